"""DPR: passages as a table, questions with right and wrong passages as JSON (2004.04906; the files of its release).

``psgs_w100.tsv`` has a header ``id text title``; a text that holds a quote stands in quotes, those in it doubled. The
JSON files are arrays of ``{dataset, question, answers, positive_ctxs, negative_ctxs, hard_negative_ctxs}``; a context
is ``{title, text, score, title_score, passage_id}`` (``psg_id`` in some). Without the table, the memory is made of the
contexts, each once. All contexts of a question stay in its meta, by id and with their scores, texts left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from data.document_store import Document
from data.formats.contexts import unique_contexts
from data.formats.format import Format, Item, Piece, Work, files, option, require, split_pieces, split_sources
from data.formats.lines import SourceFile
from data.formats.rows import Row, json_row, table_row
from data.samples import Sample

KINDS = ("positive_ctxs", "negative_ctxs", "hard_negative_ctxs")


@dataclass(frozen=True, kw_only=True)
class Dpr(Format):
    """Passages (tsv) and questions with contexts (json)."""

    name: ClassVar[str] = "dpr"
    summary: ClassVar[str] = "DPR: psgs_w100.tsv and biencoder-*.json (positive, hard negative contexts)"

    passages: Path | None = option(
        "table of passages: id, text, title (psgs_w100.tsv, also .gz)", default=None, type=Path
    )
    train: tuple[Path, ...] = files("JSON files of training questions")
    dev: tuple[Path, ...] = files("JSON files of development questions")
    test: tuple[Path, ...] = files("JSON files of test questions")

    def sources(self) -> list[SourceFile]:
        questions = split_sources("questions", {"train": self.train, "dev": self.dev, "test": self.test}, array="auto")
        table = [SourceFile("passages", self.passages, header=True)] if self.passages else []
        require(bool(table or questions), "give --passages, --train, --dev or --test")
        return [*table, *questions]

    def derive(self, work: Work) -> list[SourceFile]:
        if self.passages is not None:
            return []
        return [unique_contexts(work, [name for name in work.lines if "/" in name], _contexts, _id)]

    def pieces(self, work: Work) -> list[Piece]:
        documents = work.pieces_of("documents", "contexts" if self.passages is None else "passages")
        return documents + split_pieces(work, "questions")

    def read(self, piece: Piece, work: Work) -> Iterator[Item]:
        columns = work.lines[piece.source].columns() if piece.source == "passages" else []
        for number, text, place in work.read(piece):
            if piece.source == "passages":
                row = table_row(text, columns, place)
                yield (
                    number,
                    Document(row.id("id"), row.line("title"), {}, meta=row.rest("text"), passage=row.text("text")),
                )
            elif piece.source == "contexts":
                row = json_row(text, place)
                name, title, passage = _id(row), row.line("title", ""), row.text("text")
                yield number, Document(name, title, {}, meta=row.rest("score", "title_score"), passage=passage)
            else:
                yield number, self._question(json_row(text, place), f"{piece.source.split('/')[1]}-{number}")

    def _question(self, row: Row, name: str) -> Sample:
        contexts = {kind: row.rows(kind, []) for kind in KINDS}
        ids = {kind: tuple(map(_id, found)) for kind, found in contexts.items()}
        scores = {
            kind: [{"id": _id(context), **context.rest("title", "text")} for context in found]
            for kind, found in contexts.items()
            if found
        }
        return Sample(
            id=row.id("id", name),
            question=row.line("question"),
            answers=tuple(row.texts("answers", [])),
            kind="name",
            field=row.line("dataset", ""),
            subject="",
            gold=ids["positive_ctxs"],
            hard_negatives=ids["hard_negative_ctxs"],
            meta=row.rest() | scores,
        )


def _contexts(row: Row) -> Iterator[Row]:
    for kind in KINDS:
        yield from row.rows(kind, [])


def _id(context: Row) -> str:
    return context.id("psg_id" if "psg_id" in context and "passage_id" not in context else "passage_id")
