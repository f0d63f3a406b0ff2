"""InfoSeek: questions about entities in pictures (2302.11713), and the Wikipedia articles that answer them.

Questions are ``{data_id, image_id, question, answer: [...], answer_eval: [...], data_split}`` lines; the files "with
kb" add ``{data_id, entity_id, entity_text}``, which names the right article. ``answer_eval`` holds texts, or for
numbers ``{"wikidata": x, "range": [low, high]}``; it stays in meta, and training takes ``answer``. Articles are
``{wikidata_id, wikipedia_title, wikipedia_content, wikipedia_summary, wikipedia_image_url, ...}`` lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from data.document_store import Document
from data.formats import pictures
from data.formats.format import SPLITS, Format, Item, Piece, Work, file, option, split_pieces, split_sources
from data.formats.id_tables import LineTable
from data.formats.lines import SourceFile
from data.formats.pictures import BadPicture
from data.formats.rows import Row, json_row
from data.samples import Sample

SUFFIXES = (".jpg", ".JPEG", ".JPG", ".jpeg", ".png")


@dataclass(frozen=True, kw_only=True)
class InfoSeek(Format):
    """Questions about pictured entities."""

    name: ClassVar[str] = "infoseek"
    summary: ClassVar[str] = "InfoSeek: questions jsonl, entities (with kb), pictures and Wikipedia articles"
    rows_per_shard: ClassVar[int] = 10_000

    images: Path = option("folder of pictures (oven_00000000.jpg ...)", type=Path, metavar="DIR")
    articles: Path | None = option("Wikipedia articles, one a line", default=None, type=Path, metavar="FILE")
    train: Path | None = file("questions of train")
    dev: Path | None = file("questions of dev (val)")
    test: Path | None = file("questions of test")
    train_kb: Path | None = file("entities of the questions of train (infoseek_train_withkb.jsonl)")
    dev_kb: Path | None = file("entities of the questions of dev (infoseek_val_withkb.jsonl)")

    def sources(self) -> list[SourceFile]:
        articles = [SourceFile("articles", self.articles)] if self.articles else []
        questions = {split: [path] for split in SPLITS if (path := getattr(self, split))}
        entities = {"train": self.train_kb, "dev": self.dev_kb}
        for split, path in entities.items():
            if path is not None and split not in questions:
                raise ValueError(f"--{split}-kb needs --{split}")
        kb = split_sources("entities", {split: [path] for split, path in entities.items() if path})
        return [*articles, *split_sources("questions", questions), *kb]

    def derive(self, work: Work) -> list[SourceFile]:
        for split in SPLITS:
            self._entities(work, split)  # made once, and not in every process
        return []

    def pieces(self, work: Work) -> list[Piece]:
        documents = work.pieces_of("documents", "articles") if self.articles else []
        return documents + split_pieces(work, "questions")

    def read(self, piece: Piece, work: Work) -> Iterator[Item]:
        entities = self._entities(work, piece.split)
        for number, text, place in work.read(piece):
            row = json_row(text, place)
            if piece.folder == "documents":
                yield number, _article(row)
                continue
            image = self._picture(row)
            if isinstance(image, BadPicture):
                work.report.leave_out(image, place)
            else:
                yield number, _question(row, entities, image)

    def _picture(self, row: Row) -> bytes | BadPicture:
        name = row.id("image_id")
        found = [name + suffix for suffix in SUFFIXES]
        return pictures.read(self.images, next((n for n in found if (self.images / n).is_file()), found[0]))

    def _entities(self, work: Work, split: str) -> LineTable | None:
        lines = work.lines.get(f"entities/{split}-0")
        if lines is None:
            return None
        key = lambda text, place: json_row(text, place).id("data_id")  # noqa: E731
        return LineTable(lines, work.folder, f"entities-{split}", key)


def _article(row: Row) -> Document:
    name, title = row.id("wikidata_id"), row.line("wikipedia_title")
    return Document(name, title, {}, meta=row.rest("wikipedia_content"), passage=row.text("wikipedia_content", ""))


def _question(row: Row, entities: LineTable | None, image: bytes) -> Sample:
    name = row.id("data_id")
    gold: tuple[str, ...] = ()
    found: dict[str, Any] = {}
    if entities is not None:
        lines = list(entities.lines_of(name))
        if len(lines) != 1:
            row.fail(f"question {name} has {len(lines)} lines of entities; it must have one")
        entity = json_row(lines[0][1], lines[0][2])
        gold, found = (entity.id("entity_id"),), entity.rest("data_id")
    return Sample(
        id=name,
        question=row.line("question"),
        answers=tuple(row.texts("answer", [])),
        kind="picture",
        field="",
        subject=gold[0] if gold else "",
        gold=gold,
        image=image,
        meta={**found, "image_id": row.id("image_id"), **row.rest()},
    )
