"""Long texts cut into passages of a number of words, as DPR cuts Wikipedia (2004.04906: disjoint, 100 words).

A retriever embeds a passage into one vector, and a reader reads k of them: both want short ones. A passage keeps the
text between its words as it was (line breaks included); the last one of a document may be short. With an overlap, a
sentence that is cut at one border stands whole in the next passage; the memory grows by words / (words - overlap).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from data.document_store import Document

_WORD = re.compile(r"\S+")


@dataclass(frozen=True)
class Chunking:
    """How long passages are.

    Attributes:
        words: in a passage; 0: documents stay whole.
        overlap: words at the end of a passage that the next one begins with.
    """

    words: int = 0
    overlap: int = 0

    def __post_init__(self) -> None:
        if self.words < 0:
            raise ValueError(f"--passage-words is {self.words}; it must be 0 (documents stay whole) or more")
        if not 0 <= self.overlap < max(1, self.words):
            raise ValueError(f"--overlap is {self.overlap}; it must be at least 0 and below --passage-words")


def split(text: str, chunking: Chunking) -> list[str]:
    """The passages of a text, at least one (which is empty if the text holds no word)."""
    spans = [match.span() for match in _WORD.finditer(text)]
    if not spans:
        return [""]
    step, found = chunking.words - chunking.overlap, []
    for start in range(0, len(spans), step):
        last = min(start + chunking.words, len(spans))
        found.append(text[spans[start][0] : spans[last - 1][1]])
        if last == len(spans):
            break
    return found


def passage_id(document_id: str, number: int) -> str:
    """The id of a document's passage, counted from 0."""
    return f"{document_id}#{number}"


def cut(document: Document, chunking: Chunking) -> Iterator[Document]:
    """The passages of a document as documents ``id#0``, ``id#1``, ...; the document itself if it stays whole.

    The title and the fields stand in each; picture and meta are the first one's alone. ``meta`` of each names the
    ``document`` and the number of the ``passage``.
    """
    if not chunking.words:
        yield document
        return
    for number, text in enumerate(split(document.passage, chunking)):
        first = number == 0
        yield replace(
            document,
            id=passage_id(document.id, number),
            passage=text,
            image=document.image if first else None,
            meta={"document": document.id, "passage": number, **(document.meta if first else {})},
        )
