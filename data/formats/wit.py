"""WIT: pictures of Wikipedia with their texts, as its tables (2103.01913; ``wit_v1.*.tsv.gz``).

The tables hold addresses of pictures, not pictures; those come from the tables of pixels that were published with
them (``image_url``, base64 of the JPEG, ``metadata_url``), where given. A row is a document: its picture, page title,
section title and the page's description; and its captions (reference, attribution, alt text) are pairs that name it.
Cells are never quoted. A language can be picked, since the tables hold 108.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from data.document_store import Document
from data.formats import pictures
from data.formats.format import SPLITS, Format, Item, Piece, Work, option
from data.formats.id_tables import LineTable
from data.formats.lines import SourceFile
from data.formats.pictures import BadPicture
from data.formats.rows import Row, table_row
from data.samples import Pair

CAPTIONS = ("caption_reference_description", "caption_attribution_description", "caption_alt_text_description")
TEXT = "context_section_description"


@dataclass(frozen=True, kw_only=True)
class Wit(Format):
    """Wikipedia's pictures and their texts."""

    name: ClassVar[str] = "wit"
    summary: ClassVar[str] = "WIT: tsv (also .gz) of pictures' addresses, captions and pages, with tables of pixels"
    rows_per_shard: ClassVar[int] = 20_000

    train: tuple[Path, ...] = option("tables of train", default=(), type=Path, nargs="+", metavar="FILE")
    dev: tuple[Path, ...] = option("tables of dev (val)", default=(), type=Path, nargs="+", metavar="FILE")
    test: tuple[Path, ...] = option("tables of test", default=(), type=Path, nargs="+", metavar="FILE")
    pixels: tuple[Path, ...] = option(
        "tables of pixels: image_url, base64, metadata_url (also .gz)", default=(), type=Path, nargs="+", metavar="FILE"
    )
    language: str | None = option("take only rows of this language, such as en", default=None)

    def sources(self) -> list[SourceFile]:
        tables = {split: getattr(self, split) for split in SPLITS}
        if not any(tables.values()):
            raise ValueError("give --train, --dev or --test")
        rows = [
            SourceFile(f"rows/{s}-{i}", path, header=True)
            for s, given in tables.items()
            for i, path in enumerate(given)
        ]
        return rows + [SourceFile(f"pixels-{i}", path) for i, path in enumerate(self.pixels)]

    def derive(self, work: Work) -> list[SourceFile]:
        self._pixels(work)
        return []

    def pieces(self, work: Work) -> list[Piece]:
        names = [name for name in work.lines if name.startswith("rows/")]
        documents = [piece for name in names for piece in work.pieces_of("documents", name)]
        splits = [(name, name.removeprefix("rows/").partition("-")[0]) for name in names]
        return documents + [piece for name, split in splits for piece in work.pieces_of(f"pairs/{split}", name)]

    def read(self, piece: Piece, work: Work) -> Iterator[Item]:
        columns, tables = work.lines[piece.source].columns(), self._pixels(work)
        for number, text, place in work.read(piece):
            row = table_row(text, columns, place, quoted=False)
            if self.language is not None and row.text("language") != self.language:
                continue
            name = f"{piece.source.removeprefix('rows/')}-{number}"
            if piece.folder != "documents":
                for which in CAPTIONS:
                    if caption := row.line(which, ""):
                        yield number, Pair(f"{name}:{which.split('_')[1]}", caption, None, (name,))
                continue
            image = _picture(row.text("image_url"), tables, place)
            if isinstance(image, BadPicture):
                work.report.leave_out(image, place)
            else:
                yield number, _document(row, name, image)

    def _pixels(self, work: Work) -> list[LineTable]:
        names = [f"pixels-{i}" for i in range(len(self.pixels))]
        return [LineTable(work.lines[name], work.folder, name, _address) for name in names]


def _address(text: str, place: str) -> str:
    return table_row(text, ("image_url", "base64", "metadata_url"), place, quoted=False).text("image_url")


def _document(row: Row, name: str, image: bytes | None) -> Document:
    title, section = row.line("page_title"), row.line("section_title", "")
    text = row.text(TEXT, "") or row.text("context_page_description", "")
    fields = {"section": section} if section else {}
    shown = ("page_title", "section_title", TEXT)
    return Document(name, title, fields, image, {k: v for k, v in row.values.items() if k not in shown}, text)


def _picture(address: str, tables: list[LineTable], place: str) -> bytes | BadPicture | None:
    if not tables:
        return None
    line = next((line for table in tables for line in table.lines_of(address)), None)
    if line is None:
        return BadPicture("missing picture", f"no pixels of {address}")
    try:
        data = base64.b64decode(line[1].split("\t")[1], validate=True)
    except (binascii.Error, ValueError):
        return BadPicture("broken picture", f"{line[2]}: the pixels are not base64")
    return pictures.check(data, line[2])
