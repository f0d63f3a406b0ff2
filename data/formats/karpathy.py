"""Karpathy's files of COCO and Flickr30k: pictures, their captions and the split everybody reports (1412.2306).

``{dataset, images: [{filepath, filename, imgid, split, sentids, sentences: [{raw, tokens, imgid, sentid}], cocoid}]}``.
A picture is a document without text, each of its captions (all five) a pair that names it as right; so nothing that is
asked stands in the memory, unless ``--captioned`` writes the captions into the documents as well. ``restval`` counts
as train, as usual, and ``val`` as dev. With ``--ask TEXT`` every picture is a question as well, answered by its
captions: captioning with retrieval. Its own document names nothing that answers it, and so must not be captioned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from data.document_store import Document
from data.formats import pictures
from data.formats.format import SPLITS, Format, Item, Piece, Work, option
from data.formats.lines import SourceFile
from data.formats.pictures import BadPicture
from data.formats.rows import Row, json_row
from data.samples import Pair, Sample

SPLIT_OF = {"train": "train", "restval": "train", "val": "dev", "test": "test"}


@dataclass(frozen=True, kw_only=True)
class Coco(Format):
    """COCO captions in Karpathy's split."""

    name: ClassVar[str] = "coco"
    summary: ClassVar[str] = "COCO captions: Karpathy's dataset_coco.json and the folder of pictures"
    rows_per_shard: ClassVar[int] = 10_000

    karpathy: Path = option("dataset_coco.json", type=Path, metavar="FILE")
    images: Path = option("folder of pictures (with train2014/ and val2014/ in it, or flat)", type=Path, metavar="DIR")
    captioned: bool = option("documents hold their captions as text, too", default=False)
    ask: str | None = option("make each picture a question of this text, answered by its captions", default=None)

    def __post_init__(self) -> None:
        if self.ask is not None and self.captioned:
            raise ValueError("--ask asks for captions, which --captioned writes into the picture's own document")

    def sources(self) -> list[SourceFile]:
        return [SourceFile("images", self.karpathy, "images")]

    def pieces(self, work: Work) -> list[Piece]:
        parts = ["pairs"] if self.ask is None else ["questions", "pairs"]
        return work.pieces_of("documents", "images") + [
            piece for part in parts for split in SPLITS for piece in work.pieces_of(f"{part}/{split}", "images")
        ]

    def read(self, piece: Piece, work: Work) -> Iterator[Item]:
        for number, text, place in work.read(piece):
            row = json_row(text, place)
            split = row.text("split")
            if split not in SPLIT_OF:
                row.fail(f"split is {split!r}; allowed are {', '.join(SPLIT_OF)}")
            if piece.folder == "documents":
                found = self._document(row, work)
                if found is not None:
                    yield number, found
            elif SPLIT_OF[split] == piece.split and piece.folder.startswith("questions"):
                question = self._question(row, work)
                if question is not None:
                    yield number, question
            elif SPLIT_OF[split] == piece.split:
                for sentence in row.rows("sentences"):
                    yield number, self._pair(row, sentence)

    def _document(self, row: Row, work: Work) -> Document | None:
        image = self._picture(row)
        if isinstance(image, BadPicture):
            work.report.leave_out(image, row.place)
            return None
        captions = [sentence.text("raw") for sentence in row.rows("sentences")]
        passage = "\n".join(captions) if self.captioned else ""
        meta = {name: value for name, value in row.values.items() if name != "sentences"}
        return Document(self._id(row), "", {}, image, meta=meta, passage=passage)

    def _question(self, row: Row, work: Work) -> Sample | None:
        image = self._picture(row)
        if isinstance(image, BadPicture):
            work.report.leave_out(image, row.place)
            return None
        captions = tuple(dict.fromkeys(sentence.text("raw") for sentence in row.rows("sentences")))
        meta = {"filename": row.text("filename")}
        return Sample(self._id(row), self.ask or "", captions, "picture", "", "", (), image, meta=meta)

    def _picture(self, row: Row) -> bytes | BadPicture:
        name, folder = row.text("filename"), row.text("filepath", "")
        if folder and (self.images / folder).is_dir():
            name = f"{folder}/{name}"
        return pictures.read(self.images, name)

    def _pair(self, row: Row, sentence: Row) -> Pair:
        name, text = sentence.id("sentid"), sentence.text("raw")
        return Pair(name, text, None, (self._id(row),), meta=sentence.rest())

    def _id(self, row: Row) -> str:
        return row.id("cocoid")


@dataclass(frozen=True, kw_only=True)
class Flickr30k(Coco):
    """Flickr30k in Karpathy's split, or from the token file."""

    name: ClassVar[str] = "flickr30k"
    summary: ClassVar[str] = (
        "Flickr30k: Karpathy's dataset_flickr30k.json, or the token file, and the folder of pictures"
    )

    karpathy: Path | None = option("dataset_flickr30k.json", default=None, type=Path, metavar="FILE")  # type: ignore[assignment]
    tokens: Path | None = option(
        "results_20130124.token (picture.jpg#n, tab, caption); it knows no splits: all is --split",
        default=None, type=Path, metavar="FILE",
    )  # fmt: skip
    split: str = option("split of everything in a token file", default="train", choices=SPLITS)

    def sources(self) -> list[SourceFile]:
        if (self.karpathy is None) == (self.tokens is None):
            raise ValueError("give either --karpathy or --tokens")
        if self.tokens is not None and self.ask is not None:
            raise ValueError("--ask needs --karpathy: a token file has the captions of a picture on lines of their own")
        if self.karpathy is not None:
            return [SourceFile("images", self.karpathy, "images")]
        assert self.tokens is not None
        return [SourceFile("tokens", self.tokens)]

    def pieces(self, work: Work) -> list[Piece]:
        if self.karpathy is not None:
            return super().pieces(work)
        return [*work.pieces_of("documents", "tokens"), *work.pieces_of(f"pairs/{self.split}", "tokens")]

    def read(self, piece: Piece, work: Work) -> Iterator[Item]:
        if piece.source == "images":
            yield from super().read(piece, work)
            return
        for number, text, place in work.read(piece):
            head, tab, caption = text.partition("\t")
            name, mark, count = head.rpartition("#")
            if not (tab and mark and count.isdigit()):
                raise ValueError(f"{place}: {text[:60]!r}; a line is picture.jpg#n, a tab and the caption")
            if piece.folder != "documents":
                yield number, Pair(head, caption, None, (name,))
            elif count == "0":
                image = pictures.read(self.images, name)
                if isinstance(image, BadPicture):
                    work.report.leave_out(image, place)
                    continue
                yield number, Document(name, "", {}, image, passage=caption if self.captioned else "")

    def _id(self, row: Row) -> str:
        return row.id("imgid")
