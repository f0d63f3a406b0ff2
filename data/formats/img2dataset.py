"""img2dataset folders in its webdataset form: ``00000.tar`` with jpg, txt and json, beside it ``00000.parquet``.

Every picture is a document without text, and its caption a pair that names it as right (``--captioned``: documents
hold the caption, too). The json and what it says (url, licence, sizes) is kept in meta. The parquet says which
downloads succeeded; a tar that holds fewer or more samples is refused. For plain training on pairs such a folder need
not be converted at all: ``python -m data.shards index DIR`` makes it readable where it is.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from data.document_store import Document
from data.formats import pictures
from data.formats.format import SPLITS, Format, Item, Piece, Work, option
from data.formats.lines import SourceFile, decode
from data.formats.pictures import BadPicture
from data.formats.rows import json_row
from data.image_formats import picture_member
from data.samples import Pair
from data.shards import split_key


@dataclass(frozen=True, kw_only=True)
class Img2dataset(Format):
    """Tars of pictures with captions."""

    name: ClassVar[str] = "img2dataset"
    summary: ClassVar[str] = "img2dataset: a folder of tars (jpg, txt, json) with parquet files beside them"

    folder: Path = option("the folder", type=Path, metavar="DIR")
    split: str = option("split of everything in the folder", default="train", choices=SPLITS)
    captioned: bool = option("documents hold their caption as text, too", default=False)

    def sources(self) -> list[SourceFile]:
        return []

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
        tar, count = self._tars()[piece.start], 0
        documents = piece.folder == "documents"
        for number, (key, members) in enumerate(_samples(tar, with_pictures=documents)):
            place = f"{tar}, sample {key}"
            count += 1
            text = decode(members["txt"], f"{place}.txt").strip() if "txt" in members else ""
            meta = (
                json_row(decode(members["json"], f"{place}.json"), f"{place}.json").values if "json" in members else {}
            )
            if not text:
                text = str(meta.get("caption") or "").strip()
            if documents:
                image = pictures.check(members["picture"], place) if "picture" in members else _no_picture(place)
                if isinstance(image, BadPicture):
                    work.report.leave_out(image, place)
                else:
                    yield number, Document(key, "", {}, image, dict(meta), text if self.captioned else "")
            elif text:
                yield (
                    number,
                    Pair(key, text, None, (key,), meta={k: meta[k] for k in ("url", "similarity") if k in meta}),
                )
            else:
                work.report.note("picture without a caption: a document, but no pair", place)
        if documents:
            _check_parquet(tar, count)


def _no_picture(place: str) -> BadPicture:
    return BadPicture("missing picture", f"{place} has no picture member")


def _samples(tar: Path, *, with_pictures: bool) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Key and members (``txt``, ``json``, ``picture``) of the samples of a tar, read from front to back."""
    key: str | None = None
    members: dict[str, bytes] = {}
    try:
        with tarfile.open(tar, "r|") as archive:
            for member in archive:
                # a sparse file of a few bytes may unfold to terabytes, and is not a picture
                place = split_key(member.name) if member.isreg() and not member.issparse() else None
                if place is None:
                    continue
                if place[0] != key:
                    if key is not None:
                        yield key, members
                    key, members = place[0], {}
                if place[1] in ("txt", "json"):
                    members[place[1]] = _bytes(archive, member)
                elif picture_member({place[1]: b""}) is not None:
                    members["picture"] = _bytes(archive, member) if with_pictures else b""
            end = archive.offset
        _check_end(tar, end)
    except (tarfile.TarError, EOFError) as error:
        where = "" if key is None else f" (in or after sample {key})"
        raise ValueError(f"{tar} is not a whole uncompressed tar{where}: {error}; download it again") from None
    if key is None:
        raise ValueError(f"{tar} holds no sample")
    yield key, members


def _check_end(tar: Path, end: int) -> None:
    """EOFError if there is no end mark where ``tarfile`` stopped, which it also does, saying nothing, at damage."""
    with tar.open("rb") as file:
        file.seek(end)
        block = file.read(tarfile.BLOCKSIZE)
        size = file.seek(0, 2)
    if len(block) < tarfile.BLOCKSIZE:
        raise EOFError(f"it is cut off, there is no end mark at byte {end} of {size}")
    if any(block):
        raise EOFError(f"it is damaged, there is no header of a member at byte {end} of {size}")


def _bytes(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None
    data = file.read()
    if len(data) != member.size:
        raise EOFError(f"{member.name} is cut off")
    return data


def _check_parquet(tar: Path, count: int) -> None:
    """ValueError if the table beside the tar says that another number of downloads succeeded."""
    path = tar.with_suffix(".parquet")
    if not path.exists():
        return
    import pyarrow
    import pyarrow.parquet

    try:
        status: list[Any] = pyarrow.parquet.read_table(path, columns=["status"]).column("status").to_pylist()
    except (pyarrow.ArrowException, OSError, KeyError) as error:
        raise ValueError(f"{path} is no table of img2dataset: {json.dumps(str(error))[:120]}") from None
    succeeded = status.count("success")
    if succeeded != count:
        raise ValueError(f"{tar} holds {count} samples, but {path.name} says that {succeeded} downloads succeeded")
