"""Atlas: passages and questions as JSON lines (2208.03299; the files of its release).

Passages are ``{id, title, section, text}``, questions ``{question, answers}`` (``target`` where one answer is to be
trained on). No passage is named as right: training from answers alone is the point.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from data.document_store import Document
from data.formats.format import Format, Item, Piece, Work, files, split_pieces, split_sources
from data.formats.lines import SourceFile
from data.formats.rows import Row, json_row
from data.samples import Sample


@dataclass(frozen=True, kw_only=True)
class Atlas(Format):
    """Passages and questions without labels between them."""

    name: ClassVar[str] = "atlas"
    summary: ClassVar[str] = "Atlas: jsonl of passages (id, title, section, text) and of questions (question, answers)"

    passages: tuple[Path, ...] = files("files of passages")
    train: tuple[Path, ...] = files("files of training questions")
    dev: tuple[Path, ...] = files("files of development questions")
    test: tuple[Path, ...] = files("files of test questions")

    def sources(self) -> list[SourceFile]:
        passages = [SourceFile(f"passages-{i}", path) for i, path in enumerate(self.passages)]
        return passages + split_sources("questions", {"train": self.train, "dev": self.dev, "test": self.test})

    def pieces(self, work: Work) -> list[Piece]:
        documents = [p for i in range(len(self.passages)) for p in work.pieces_of("documents", f"passages-{i}")]
        return documents + split_pieces(work, "questions")

    def read(self, piece: Piece, work: Work) -> Iterator[Item]:
        for number, text, place in work.read(piece):
            row = json_row(text, place)
            if piece.folder == "documents":
                yield number, _document(row)
            else:
                yield number, _question(row, f"{piece.source.split('/')[1]}-{number}")


def _document(row: Row) -> Document:
    section = row.line("section", "")
    name, title, passage = row.id("id"), row.line("title", ""), row.text("text")
    return Document(name, title, {"section": section} if section else {}, meta=row.rest(), passage=passage)


def _question(row: Row, name: str) -> Sample:
    answers, target = row.texts("answers", []), row.text("target", "")
    target = target.removeprefix("<extra_id_0>").strip()  # T5's mask, which Atlas writes before targets
    return Sample(
        id=row.id("id", name),
        question=row.line("question"),
        answers=tuple(dict.fromkeys([target, *answers] if target else answers)),
        kind="name",
        field="",
        subject="",
        gold=(),
        meta=row.rest(),
    )
