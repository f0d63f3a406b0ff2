"""FiD: questions with the passages that were retrieved for them, as a JSON array or as lines (2007.01282).

``{id, question, target, answers, ctxs: [{id, title, text, score, hasanswer}]}``. The memory is made of the contexts,
each once; a context that says ``hasanswer`` is a right document, and one that says it has none is a hard negative.
``target``, where there is one, is the answer to train on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from data.document_store import Document
from data.formats.contexts import unique_contexts
from data.formats.format import Format, Item, Piece, Work, files, require, split_pieces, split_sources
from data.formats.lines import SourceFile
from data.formats.rows import Row, json_row
from data.samples import Sample


@dataclass(frozen=True, kw_only=True)
class Fid(Format):
    """Questions with retrieved contexts."""

    name: ClassVar[str] = "fid"
    summary: ClassVar[str] = "FiD: json or jsonl of questions with ctxs (id, title, text, hasanswer)"

    train: tuple[Path, ...] = files("files of training questions")
    dev: tuple[Path, ...] = files("files of development questions")
    test: tuple[Path, ...] = files("files of test questions")

    def sources(self) -> list[SourceFile]:
        found = split_sources("questions", {"train": self.train, "dev": self.dev, "test": self.test}, array="auto")
        require(bool(found), "give --train, --dev or --test")
        return found

    def derive(self, work: Work) -> list[SourceFile]:
        return [unique_contexts(work, list(work.lines), lambda row: iter(row.rows("ctxs")), lambda c: c.id("id"))]

    def pieces(self, work: Work) -> list[Piece]:
        return work.pieces_of("documents", "contexts") + split_pieces(work, "questions")

    def read(self, piece: Piece, work: Work) -> Iterator[Item]:
        for number, text, place in work.read(piece):
            row = json_row(text, place)
            if piece.source == "contexts":
                name, title, passage = row.id("id"), row.line("title", ""), row.text("text")
                meta = row.rest("score", "hasanswer")  # of the question it was met at
                yield number, Document(name, title, {}, meta=meta, passage=passage)
            else:
                yield number, _question(row, f"{piece.source.split('/')[1]}-{number}")


def _question(row: Row, name: str) -> Sample:
    contexts = row.rows("ctxs")
    answers, target = row.texts("answers", []), row.text("target", "")
    return Sample(
        id=row.id("id", name),
        question=row.line("question"),
        answers=tuple(dict.fromkeys([target, *answers] if target else answers)),
        kind="name",
        field="",
        subject="",
        gold=tuple(c.id("id") for c in contexts if c.get("hasanswer") is True),
        hard_negatives=tuple(c.id("id") for c in contexts if c.get("hasanswer") is False),
        meta={**row.rest(), "ctxs": [{"id": c.id("id"), **c.rest("title", "text", "hasanswer")} for c in contexts]},
    )
