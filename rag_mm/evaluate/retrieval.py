"""What is retrieved for questions, and the embeddings that the reader weighs it by.

Questions are embedded in blocks of 64 neighbours of the data set's order, whatever is asked of them later: by whom,
in which batches, or again after a kill. A matrix product may round its last bit by how many rows it has, and a
score that is written with six digits must not depend on the number of ranks. Neighbours are often about the same
documents, so embedding a block's different documents once costs little.

Shapes: n questions of a block, U different documents that they read, E embedding width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from data.dataset import Dataset, Sample
from data.samples import forbidden_of
from rag_mm.batch import Collator
from rag_mm.config import Config
from rag_mm.evaluate.layout import Layout
from retriever.bm25 import Bm25
from retriever.embed import stored_features
from retriever.hybrid import fuse
from retriever.index import Index

Documents = Literal["retrieved", "gold", "none", "bm25"]
DEPTH = 4  # of a row's figures, hit@4 is the deepest
BLOCK = 64


@dataclass(frozen=True)
class Found:
    """For one question.

    Attributes:
        ids: of documents, best first: all that were searched for, of which the reader reads the first ``num_read``.
        scores: query.document of each, or BM25's.
        query_E: embedding of the question.
        document_kE: embeddings of the documents that the reader reads; zeros (1, E) for a closed book.
        truncated: whether the question was cut off for the retriever.
    """

    ids: tuple[str, ...]
    scores: tuple[float, ...]
    query_E: Tensor
    document_kE: Tensor
    truncated: bool = False

    @property
    def read(self) -> tuple[str, ...]:
        """Ids that the reader reads."""
        return self.ids[: self.document_kE.shape[0]]


class Retrieval:
    """Finds what the reader is to read.

    Args:
        index: of the model's weights, on ranks that search; None elsewhere, or if nothing is to be retrieved.
        depth: documents that are searched for (or k, if that is more).
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        collator: Collator,
        layout: Layout,
        index: Index | None,
        *,
        depth: int = DEPTH,
    ) -> None:
        self.depth = max(config.retriever.k, depth)
        self.config, self.dataset, self.collator, self.layout, self.index = config, dataset, collator, layout, index
        self._bm25: tuple[int, Bm25] | None = None  # of the store as of an edit

    def find(self, samples: Sequence[Sample], documents: Documents) -> list[Found]:
        """For the questions of one block; all ranks of a replica call it."""
        encoder, size = self.layout.encoder, self.config.data.image_size
        image, has_image = self.collator.images([s.image for s in samples])
        before = encoder.featurizer.truncated
        features = encoder.features([s.question for s in samples], image, has_image, side="query")
        cut = [False] * len(samples)
        if encoder.featurizer.truncated > before:
            cut = [self._is_cut(sample.question) for sample in samples]
        query = self.layout.embed(features)
        if documents == "none":
            blank = torch.zeros(1, query.shape[1])
            return [Found((), (), row, blank, own) for row, own in zip(query, cut, strict=True)]
        ids, scores = self._search(samples, query, documents)
        names = [row[: self.config.retriever.k] for row in ids]
        unique = sorted({name for row in names for name in row})
        features = stored_features(encoder, self.dataset.store, unique, image_size=size)
        embedding = self.layout.embed(features)
        place = {name: i for i, name in enumerate(unique)}
        read = [embedding[[place[name] for name in row]] for row in names]
        if scores is None:
            scores = [(document @ row).tolist() for row, document in zip(query, read, strict=True)]
        return [
            Found(tuple(own), tuple(score), row, document, is_cut)
            for own, score, row, document, is_cut in zip(ids, scores, query, read, cut, strict=True)
        ]

    def _is_cut(self, question: str) -> bool:
        encoder, size = self.layout.encoder, self.config.data.image_size
        before = encoder.featurizer.truncated
        encoder.features([question], torch.ones(1, 3, size, size), torch.zeros(1), side="query")
        return encoder.featurizer.truncated > before

    def _search(
        self, samples: Sequence[Sample], query: Tensor, documents: Documents
    ) -> tuple[list[list[str]], list[list[float]] | None]:
        """Document ids, best first, and their scores (None: to be computed)."""
        if documents == "gold":
            return [[sample.subject] for sample in samples], None
        found: tuple[list[list[str]], list[list[float]]] | None = None
        if self.layout.searches and documents == "bm25":
            memory = self._words()
            depth = min(self.depth, len(memory.ids))
            asked = [sample.question for sample in samples]
            found = memory.search(asked, k=depth, forbidden=forbidden_of(samples))
        elif self.layout.searches:
            if self.index is None:
                raise ValueError("nothing can be retrieved without an index")
            depth = min(self.depth, len(self.index.ids))
            found = self._by_embedding(samples, query, depth)
        return self.layout.over_stages(found)

    def _by_embedding(
        self, samples: Sequence[Sample], query: Tensor, depth: int
    ) -> tuple[list[list[str]], list[list[float]]]:
        """What the index finds, fused with what the words find if the configuration asks for it."""
        assert self.index is not None
        how, wide = self.config.retriever.hybrid, min(self.config.retriever.hybrid_depth, len(self.index))
        barred = forbidden_of(samples)
        ids, scores = self.index.search(query, k=depth if how == "none" else max(depth, wide), forbidden=barred)
        if how == "none":
            return ids, scores.tolist()
        words = self._words()
        asked = [sample.question for sample in samples]
        lexical = words.search(asked, k=min(max(depth, wide), len(words.ids)), forbidden=barred)
        weight = self.config.retriever.hybrid_weight
        return fuse((ids, scores.tolist()), lexical, how=how, weight=weight, k=depth)

    def _words(self) -> Bm25:
        """The memory's words, made anew if it was edited."""
        edit = self.dataset.store.num_edits
        if self._bm25 is None or self._bm25[0] != edit:
            self._bm25 = edit, Bm25(self.dataset.store)
        return self._bm25[1]
