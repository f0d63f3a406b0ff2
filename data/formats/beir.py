"""BEIR: a corpus, searches and relevance judgements (2104.08663).

``corpus.jsonl`` has ``{_id, title, text, metadata}``, ``queries.jsonl`` ``{_id, text, metadata}``, and
``qrels/{train,dev,test}.tsv`` a header and ``query-id corpus-id score``. A search that a split judges is a pair of
that split: its right documents are those with a score above 0, those judged 0 are hard negatives. A judgement of an
unknown search or document is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from data.document_store import Document
from data.formats.format import SPLITS, Format, Item, Piece, Work, option, require
from data.formats.id_tables import LineTable
from data.formats.lines import SourceFile
from data.formats.rows import Row, json_row, table_row
from data.samples import Pair

COLUMNS = ("query-id", "corpus-id", "score")


@dataclass(frozen=True, kw_only=True)
class Beir(Format):
    """Searches with judged documents."""

    name: ClassVar[str] = "beir"
    summary: ClassVar[str] = "BEIR: a folder with corpus.jsonl, queries.jsonl and qrels/*.tsv"

    folder: Path = option("the folder", type=Path, metavar="DIR")

    def sources(self) -> list[SourceFile]:
        qrels = [
            SourceFile(f"qrels-{split}", path, header=True)
            for split in SPLITS
            for path in [self.folder / "qrels" / f"{split}.tsv"]
            if path.exists()
        ]
        require(bool(qrels), f"--folder is {self.folder}, which has no qrels/train.tsv, dev.tsv or test.tsv")
        return [
            SourceFile("corpus", self.folder / "corpus.jsonl"),
            SourceFile("queries", self.folder / "queries.jsonl"),
            *qrels,
        ]

    def derive(self, work: Work) -> list[SourceFile]:
        queries = self._queries(work)
        for split in SPLITS:
            if self._table(work, split) is None:  # makes it, once and not in every process
                continue
            lines = work.lines[f"qrels-{split}"]
            for number, text in lines.read_all():
                place = lines.place(number)
                name = _judgement(text, place).id("query-id")
                if next(queries.lines_of(name), None) is None:
                    raise ValueError(f"{place}: there is no query {name!r} in {self.folder / 'queries.jsonl'}")
        return []

    def pieces(self, work: Work) -> list[Piece]:
        splits = [split for split in SPLITS if f"qrels-{split}" in work.lines]
        pairs = [
            Piece(f"pairs/{split}", "queries", p.start, p.stop)
            for split in splits
            for p in work.pieces_of("pairs", "queries")
        ]
        return work.pieces_of("documents", "corpus") + pairs

    def read(self, piece: Piece, work: Work) -> Iterator[Item]:
        judged = self._table(work, piece.split) if piece.folder != "documents" else None
        for number, text, place in work.read(piece):
            row = json_row(text, place)
            name = row.id("_id")
            if judged is None:
                title, passage = row.line("title", ""), row.text("text")
                yield number, Document(name, title, {}, meta=row.rest(), passage=passage)
                continue
            scores = self._scores(judged, name, work)
            if scores:
                yield number, Pair(
                    name, row.text("text"), None,
                    gold=tuple(document for document, score in scores.items() if score > 0),
                    hard_negatives=tuple(document for document, score in scores.items() if score <= 0),
                    meta={**row.rest(), "scores": scores},
                )  # fmt: skip

    def _scores(self, judged: LineTable, name: str, work: Work) -> dict[str, int]:
        assert work.memory is not None
        scores: dict[str, int] = {}
        for _, text, place in judged.lines_of(name):
            row = _judgement(text, place)
            document = row.id("corpus-id")
            if not work.memory.ids(document):
                raise ValueError(f"{place}: there is no document {document!r} in {self.folder / 'corpus.jsonl'}")
            try:
                scores[document] = int(row.text("score"))
            except ValueError:
                row.fail(f"score is {row.text('score')!r}; it must be a whole number")
        return scores

    def _queries(self, work: Work) -> LineTable:
        return LineTable(
            work.lines["queries"], work.folder, "queries-by-id", lambda text, place: json_row(text, place).id("_id")
        )

    def _table(self, work: Work, split: str) -> LineTable | None:
        name = f"qrels-{split}"
        if name not in work.lines:
            return None
        return LineTable(
            work.lines[name], work.folder, name, lambda text, place: _judgement(text, place).id("query-id")
        )


def _judgement(text: str, place: str) -> Row:
    return table_row(text, COLUMNS, place, quoted=False)
