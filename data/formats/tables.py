"""A folder of pictures and a table of them: csv, tsv or JSON lines (also ``metadata.csv`` of the imagefolder kind).

A csv has a header; cells may be quoted, but not go on over lines. Rows are what `data.formats.columns` says; a
``split`` column tells train, dev (validation, val) and test apart, else all rows are ``--split``.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from data.formats import pictures
from data.formats.columns import SPLIT_OF, Roles
from data.formats.format import SPLITS, Format, Item, Piece, Work, option
from data.formats.lines import SourceFile
from data.formats.pictures import BadPicture
from data.formats.rows import Row, json_row, table_row

SEPARATORS = {".csv": ",", ".tsv": "\t"}


@dataclass(frozen=True, kw_only=True)
class Folder(Format):
    """Pictures in a folder, and a table that names them."""

    name: ClassVar[str] = "folder"
    summary: ClassVar[str] = "a folder of pictures with a csv, tsv or jsonl table of captions, questions or texts"
    rows_per_shard: ClassVar[int] = 10_000

    table: Path = option("the table (.csv, .tsv or .jsonl, also .gz)", type=Path, metavar="FILE")
    images: Path | None = option(
        "folder that the table's pictures are named in (that of the table)", default=None, type=Path, metavar="DIR"
    )
    column: tuple[str, ...] = option(
        "which column is what: id, image, caption, question, answers, gold, negatives, forbidden, title, text, split",
        default=(), nargs="+", metavar="ROLE=NAME",
    )  # fmt: skip
    split: str = option("split of all rows, where no column says it", default="train", choices=SPLITS)
    captioned: bool = option("documents hold their captions as text, too", default=False)

    @property
    def _separator(self) -> str | None:
        suffix = Path(self.table.stem).suffix if self.table.suffix == ".gz" else self.table.suffix
        if suffix not in (*SEPARATORS, ".jsonl", ".json", ".ndjson"):
            raise ValueError(f"--table is {self.table}; it must end in .csv, .tsv or .jsonl (or .gz after that)")
        return SEPARATORS.get(suffix)

    def sources(self) -> list[SourceFile]:
        return [SourceFile("table", self.table, header=self._separator is not None)]

    def _columns(self, work: Work) -> list[str]:
        lines = work.lines["table"]
        if self._separator is not None:
            return next(csv.reader([lines.columns("\n")[0]], delimiter=self._separator))
        number, text = next(lines.read(0))
        return list(json_row(text, lines.place(number)).values)

    def _roles(self, work: Work) -> Roles:
        return Roles.find(self._columns(work), self.column, str(self.table))

    def columns(self, work: Work) -> dict[str, str]:
        return self._roles(work).columns

    def pieces(self, work: Work) -> list[Piece]:
        roles = self._roles(work)
        splits = SPLITS if "split" in roles.columns else (self.split,)
        found = work.pieces_of("documents", "table") if roles.tells else []
        for part, wanted in (("questions", roles.asks), ("pairs", roles.captions)):
            found += [p for split in splits if wanted for p in work.pieces_of(f"{part}/{split}", "table")]
        return found

    def read(self, piece: Piece, work: Work) -> Iterator[Item]:
        columns = self._columns(work)
        roles = Roles.find(columns, self.column, str(self.table))
        for number, text, place in work.read(piece):
            if self._separator is None:
                row = json_row(text, place)
            else:
                row = table_row(text, columns, place, separator=self._separator)
            if piece.folder != "documents" and self._split(row, roles) != piece.split:
                continue
            if piece.folder.startswith("pairs"):
                for pair in roles.pairs(row, str(number)):
                    yield number, pair
                continue
            image = self._picture(row, roles)
            if isinstance(image, BadPicture):
                work.report.leave_out(image, place)
            elif piece.folder == "documents":
                self._split(row, roles)
                yield number, roles.document(row, str(number), image, captioned=self.captioned)
            else:
                yield number, roles.question(row, str(number), image)

    def _split(self, row: Row, roles: Roles) -> str:
        if "split" not in roles.columns:
            return self.split
        split = row.text(roles.columns["split"])
        if split not in SPLIT_OF:
            row.fail(f"{roles.columns['split']} is {split!r}; allowed are {', '.join(SPLIT_OF)}")
        return SPLIT_OF[split]

    def _picture(self, row: Row, roles: Roles) -> bytes | BadPicture | None:
        name = row.text(roles.columns["image"], "") if "image" in roles.columns else ""
        return pictures.read(self.images or self.table.parent, name) if name else None
