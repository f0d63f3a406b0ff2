"""BM25 over the texts of the memory: what words alone find.

Lucene's variant with k1 1.5 and b 0.75, words of two letters or more in lower case, no stop words, no stemming (`bm25s`
and its defaults but for stop words). What is searched is what the dual encoder embeds, title and passage, as of the
store's present edit; fields stay out of both, and a picture is not seen. The index is made anew and held in memory,
about the size of the texts: enough for a row of a table, not for a memory of millions.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy

from data.document_store import DocumentStore

WORD = re.compile(r"(?u)\b\w\w+\b")
_AT_ONCE = 4096  # documents fetched


class Bm25:
    """An index of a document store.

    Raises:
        ValueError: if the store has no documents, or no words.
    """

    def __init__(self, store: DocumentStore) -> None:
        import bm25s

        self.ids = sorted(store.ids)
        texts: list[list[str]] = []
        for start in range(0, len(self.ids), _AT_ONCE):
            some = store.read(self.ids[start : start + _AT_ONCE], pictures=())
            texts += [words(document.search_text) for document in some]
        if not any(texts):
            raise ValueError("there are no words in the memory, so BM25 can find nothing")
        self._known = {word for text in texts for word in text}
        self._index: Any = bm25s.BM25(k1=1.5, b=0.75, method="lucene")
        self._index.index(texts, show_progress=False)

    def search(
        self, questions: Sequence[str], *, k: int, forbidden: Sequence[Collection[str]] | None = None
    ) -> tuple[list[list[str]], list[list[float]]]:
        """Ids and scores of the k best documents of each question, ties by id.

        Args:
            forbidden: for each question, documents that it must not find.

        Raises:
            ValueError: if there are fewer than k documents, or fewer are left to a question.
        """
        if k > len(self.ids):
            raise ValueError(f"{k} documents are asked for; the memory holds only {len(self.ids)}")
        ids, scores = [], []
        for question, barred in zip(questions, forbidden or [()] * len(questions), strict=True):
            asked = [word for word in words(question) if word in self._known]
            found = self._index.get_scores(asked) if asked else numpy.zeros(len(self.ids))
            if barred:
                gone = set(barred)
                alive = numpy.array([name not in gone for name in self.ids])
                if alive.sum() < k:
                    raise ValueError(f"{k} documents are asked for; a question is left with {alive.sum()}")
                found = numpy.where(alive, found, -numpy.inf)
            best = numpy.argsort(-found, kind="stable")[:k]
            ids.append([self.ids[i] for i in best])
            scores.append([float(found[i]) for i in best])
        return ids, scores


def words(text: str) -> list[str]:
    """What counts as a word, in order."""
    return WORD.findall(text.lower())
