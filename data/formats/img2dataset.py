"""img2dataset folders in its webdataset form: ``00000.tar`` with jpg, txt and json, beside it ``00000.parquet``.

Every picture is a document without text, and its caption a pair that names it as right (``--captioned``: documents
hold the caption, too). The json and what it says (url, licence, sizes) is kept in meta. ``train.py`` reads the data
set that this makes; a loop of one's own can read such a folder as it is (`data.loader`), once ``python -m data.shards
index DIR`` has indexed it.

A crawl of a week leaves tars that are cut off, captions that are not UTF-8 and pictures that are none. What is whole is
converted and the rest counted by reason, with the first tar and sample of each; too many stop the conversion. How many
a damaged tar has lost the parquet says, whose successful downloads should all be there; without one it counts as one.
A whole tar that holds another number of samples than the parquet says belongs to another parquet, and is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from data.decoding import MAX_TEXT_BYTES
from data.document_store import Document
from data.formats import pictures, stamps
from data.formats.format import SPLITS, Format, Item, Piece, Work, option
from data.formats.lines import SourceFile, decode
from data.formats.pictures import BadPicture
from data.formats.rows import json_row
from data.image_formats import EXTENSIONS, MAX_BYTES
from data.samples import Pair
from data.shard_index import ShardIndex, build_index
from data.tar_members import BLOCK

BEHIND = "sample lost in a damaged tar"


@dataclass(frozen=True, kw_only=True)
class Img2dataset(Format):
    """Tars of pictures with captions."""

    name: ClassVar[str] = "img2dataset"
    summary: ClassVar[str] = "img2dataset: a folder of tars (jpg, txt, json) with parquet files beside them"
    shard_a_file: ClassVar[bool] = True

    folder: Path = option("the folder", type=Path, metavar="DIR")
    split: str = option("split of everything in the folder", default="train", choices=SPLITS)
    captioned: bool = option("documents hold their caption as text, too", default=False)

    def sources(self) -> list[SourceFile]:
        return []

    def stamps(self) -> dict[str, Any]:
        tars = self._tars()
        return stamps.stamps([*tars, *(path for tar in tars if (path := tar.with_suffix(".parquet")).exists())])

    def _tars(self) -> list[Path]:
        found = sorted(self.folder.glob("*.tar"))
        if not found:
            raise ValueError(f"--folder is {self.folder}, which holds no *.tar")
        return found

    def pieces(self, work: Work) -> list[Piece]:
        count = range(len(self._tars()))
        documents = [Piece("documents", "tars", i, i + 1) for i in count]
        return documents + [Piece(f"pairs/{self.split}", "tars", i, i + 1) for i in count]

    def place(self, piece: Piece, number: int, work: Work) -> str:
        return f"{self._tars()[piece.start]}, sample {number + 1}"

    def read(self, piece: Piece, work: Work) -> Iterator[Item]:
        tar = self._tars()[piece.start]
        documents = piece.folder == "documents"
        index = _index(tar, work, "" if documents else "caption of a ")
        if index is None:
            return
        with tar.open("rb") as file:
            for number, key in enumerate(index.keys()):
                place = f"{tar}, sample {key}"
                sample = _Sample(file.fileno(), index, number, place)
                text, meta, bad = sample.said()
                if bad is not None:
                    work.report.leave_out(bad if documents else BadPicture(f"caption: {bad.reason}", bad.detail), place)
                elif documents:
                    image = sample.picture()
                    if isinstance(image, BadPicture):
                        work.report.leave_out(image, place)
                    else:
                        yield number, Document(key, "", {}, image, dict(meta), text if self.captioned else "")
                elif text:
                    kept: dict[str, Any] = {k: meta[k] for k in ("url", "similarity") if k in meta}
                    yield number, Pair(key, text, None, (key,), meta=kept)
                else:
                    work.report.note("picture without a caption: a document, but no pair", place)


class _Sample:
    """One sample of a tar."""

    def __init__(self, fd: int, index: ShardIndex, row: int, place: str) -> None:
        self._fd, self._place = fd, place
        self._members, self._problem = index.members(row), index.problem(row)

    def said(self) -> tuple[str, dict[str, Any], BadPicture | None]:
        """Its caption, what its json says, and why it cannot be used."""
        if self._problem is not None:
            return "", {}, BadPicture(self._problem, self._problem)
        try:
            meta = dict(json_row(self._text("json"), f"{self._place}.json").values) if "json" in self._members else {}
            text = self._text("txt").strip() if "txt" in self._members else ""
        except ValueError as error:  # names place and byte
            return "", {}, BadPicture("json or txt that cannot be read", str(error))
        return text or str(meta.get("caption") or "").strip(), meta, None

    def picture(self) -> bytes | BadPicture:
        name = next((extension for extension in EXTENSIONS if extension in self._members), None)
        if name is None:
            return BadPicture("missing picture", f"{self._place} has no picture member")
        if self._members[name][1] > MAX_BYTES:
            return BadPicture("picture too large", f"{self._place} has {self._members[name][1]} bytes")
        return pictures.check(self._read(name), self._place)

    def _text(self, name: str) -> str:
        size = self._members[name][1]
        if size > MAX_TEXT_BYTES:
            raise ValueError(f"{self._place}.{name} has {size} bytes, more than {MAX_TEXT_BYTES}")
        return decode(self._read(name), f"{self._place}.{name}")

    def _read(self, name: str) -> bytes:
        offset, size = self._members[name]
        parts = []
        while size:
            part = os.pread(self._fd, size, offset)
            if not part:
                raise ValueError(f"{self._place}: the tar became shorter while it was converted; begin anew")
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return b"".join(parts)


def _index(tar: Path, work: Work, what: str) -> ShardIndex | None:
    """What lies where in a tar; None if nothing can be read of it, which counts.

    Raises:
        ValueError: it is compressed, or something else altogether, or of another parquet.
    """
    succeeded = _succeeded(tar)
    if tar.stat().st_size < BLOCK:  # a download that failed; a tar of nothing has 1024 bytes
        lost, index, reason = max(1, succeeded or 0), None, f"it has {tar.stat().st_size} bytes"
    else:
        index = build_index(tar)
        rows, reason = len(index), index.unread_reason
        lost = 0 if succeeded is None or not reason else max(0, succeeded - rows)
        if reason and not lost and not rows:
            lost = 1
        if not reason and not rows:
            raise ValueError(f"{tar} holds no sample")
        if succeeded is not None and (rows > succeeded or (rows < succeeded and not reason)):
            raise ValueError(
                f"{tar} holds {rows} samples, but {tar.with_suffix('.parquet').name} says that {succeeded} downloads "
                "succeeded"
            )
    if lost:
        work.report.leave_out(BadPicture(what + BEHIND, reason), str(tar), lost)
    elif index is not None and reason:
        work.report.note(f"tar that is damaged at its end: {reason}", str(tar))
    if index is not None:
        work.report.note("member of a tar that belongs to no sample", str(tar), index.num_ignored)
    return index


def _succeeded(tar: Path) -> int | None:
    """How many downloads succeeded, as the table beside the tar says; None without one."""
    path = tar.with_suffix(".parquet")
    if not path.exists():
        return None
    import pyarrow
    import pyarrow.parquet

    try:
        status: list[Any] = pyarrow.parquet.read_table(path, columns=["status"]).column("status").to_pylist()
    except (pyarrow.ArrowException, OSError, KeyError) as error:
        raise ValueError(f"{path} is no table of img2dataset: {json.dumps(str(error))[:120]}") from None
    return status.count("success")
