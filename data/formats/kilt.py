"""KILT: a task's questions and the knowledge source, as JSON lines (2009.02252).

Questions are ``{id, input, output: [{answer, provenance: [{wikipedia_id, title, start_paragraph_id, ...}], meta}],
meta}``; test files have no output. A page of the knowledge source is ``{_id, wikipedia_id, wikipedia_title, text:
[paragraph, ...], anchors, categories, history, ...}``; paragraph 0 is the title. Right documents are the pages that
any provenance names (with ``--passage-words``, all passages of those pages); the outputs stay whole in meta, because
KILT's scores ask for the sets of evidence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from data.document_store import Document
from data.formats.format import Format, Item, Piece, Work, files, option, split_pieces, split_sources
from data.formats.lines import SourceFile
from data.formats.rows import Row, json_row
from data.samples import Sample


@dataclass(frozen=True, kw_only=True)
class Kilt(Format):
    """Questions of a task, and pages."""

    name: ClassVar[str] = "kilt"
    summary: ClassVar[str] = "KILT: a task's jsonl (input, output with provenance) and kilt_knowledgesource.json"

    knowledge: Path | None = option(
        "the knowledge source, one page a line (kilt_knowledgesource.json, also .gz)", default=None, type=Path
    )
    train: tuple[Path, ...] = files("files of training questions")
    dev: tuple[Path, ...] = files("files of development questions")
    test: tuple[Path, ...] = files("files of test questions")

    def sources(self) -> list[SourceFile]:
        pages = [SourceFile("knowledge", self.knowledge)] if self.knowledge else []
        return pages + split_sources("questions", {"train": self.train, "dev": self.dev, "test": self.test})

    def pieces(self, work: Work) -> list[Piece]:
        pages = work.pieces_of("documents", "knowledge") if self.knowledge else []
        return pages + split_pieces(work, "questions")

    def read(self, piece: Piece, work: Work) -> Iterator[Item]:
        for number, text, place in work.read(piece):
            row = json_row(text, place)
            yield number, _page(row) if piece.folder == "documents" else _question(row)


def _page(row: Row) -> Document:
    name, title, paragraphs = row.id("wikipedia_id"), row.line("wikipedia_title"), row.texts("text")
    if paragraphs and " ".join(paragraphs[0].split()) == title:
        paragraphs = paragraphs[1:]
    passage = "\n".join(p.rstrip("\n") for p in paragraphs)
    return Document(name, title, {}, meta=row.rest(), passage=passage)


def _question(row: Row) -> Sample:
    answers: list[str] = []
    gold: list[str] = []
    for output in row.rows("output", []):
        if "answer" in output:
            answers.append(output.text("answer"))
        gold += [evidence.id("wikipedia_id") for evidence in output.rows("provenance", [])]
    return Sample(
        id=row.id("id"),
        question=row.text("input"),
        answers=tuple(dict.fromkeys(answers)),
        kind="name",
        field="",
        subject="",
        gold=tuple(dict.fromkeys(gold)),
        meta={**row.rest(), **({"output": row.values["output"]} if "output" in row else {})},
    )
