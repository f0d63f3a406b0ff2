"""The ids of an index's vectors in one flat file that is mapped into memory.

A JSON list of 21 million ids takes minutes to parse and gigabytes to hold. Here an id is a slice of a file: the texts
one after another, then where each ends (int64), then their number and a mark. Written in one pass over ids that
need not be in memory; reading costs two look-ups an id and nothing at the start but a check that every slice is
text. Finding the row of an id needs a table of hashes, which is made when first asked for (16 bytes an id).
"""

from __future__ import annotations

import codecs
import functools
import mmap
import os
import stat
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy
import xxhash
from numpy.typing import NDArray

from retriever.manifest import ANEW

FOOTER = struct.Struct("<q8s")  # their number, the mark
MARK = b"rag_ids1"
_AT_ONCE = 1 << 20


class Shifted(Sequence[str]):
    """A sequence from a place on, without a copy."""

    def __init__(self, whole: Sequence[str], start: int) -> None:
        self._whole, self._start = whole, start

    def __len__(self) -> int:
        return len(self._whole) - self._start

    def __getitem__(self, i: Any) -> Any:
        return self._whole[i + self._start]


class IdFile(Sequence[str]):
    """The ids in a file, by row; safe to share, never changed."""

    def __init__(self, path: Path) -> None:
        """Open a file.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is no such file; names it.
        """
        self._path = path
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{path} is not a regular file; {ANEW}")
            if status.st_size < FOOTER.size:
                raise ValueError(f"{path} is damaged: it has {status.st_size} bytes; {ANEW}")
            self._bytes = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        count, mark = FOOTER.unpack(self._bytes[-FOOTER.size :])
        length = status.st_size - FOOTER.size - 8 * count
        if mark != MARK or count < 0 or length < 0:
            raise ValueError(f"{path} is damaged: it does not hold ids; {ANEW}")
        raw = numpy.frombuffer(self._bytes, numpy.uint8)
        self._ends = raw[length : length + 8 * count].view("<i8")
        self._check(raw[:length])

    def _check(self, text: NDArray[numpy.uint8]) -> None:
        last = 0
        for first in range(0, len(self), _AT_ONCE):
            ends = self._ends[first : first + _AT_ONCE]
            inside = ends[ends < len(text)]
            if ends[0] < last or (numpy.diff(ends) < 0).any() or ends[-1] > len(text):
                raise ValueError(f"{self._path} is damaged: its ids overlap; {ANEW}")
            if ((text[inside] & 0xC0) == 0x80).any():
                raise ValueError(f"{self._path} is damaged: an id ends within a character; {ANEW}")
            last = int(ends[-1])
        if last != len(text):
            raise ValueError(f"{self._path} is damaged: {len(text) - last} bytes belong to no id; {ANEW}")
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            for first in range(0, len(text), _AT_ONCE):
                decoder.decode(text[first : first + _AT_ONCE].tobytes())
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            raise ValueError(f"{self._path} is damaged: the ids are not UTF-8; {ANEW}") from None

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, i: int) -> str: ...

    @overload
    def __getitem__(self, i: slice) -> list[str]: ...

    def __getitem__(self, i: int | slice) -> str | list[str]:
        rows = range(len(self))[i]
        return self._id(rows) if isinstance(rows, int) else [self._id(row) for row in rows]

    def _id(self, row: int) -> str:
        return self._bytes[int(self._ends[row - 1]) if row else 0 : int(self._ends[row])].decode()

    def __iter__(self) -> Iterator[str]:
        start = 0
        for first in range(0, len(self), _AT_ONCE):
            for end in self._ends[first : first + _AT_ONCE].tolist():
                yield self._bytes[start:end].decode()
                start = end

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} ids of {self._path}>"

    def find(self, ids: Sequence[str]) -> NDArray[numpy.int64]:
        """The last row of each id, -1 where there is none."""
        hashes, order = self._table
        found = numpy.full(len(ids), -1, dtype=numpy.int64)
        for i, name in enumerate(ids):
            wanted = numpy.uint64(xxhash.xxh3_64_intdigest(name.encode()))
            place = int(numpy.searchsorted(hashes, wanted, side="right"))
            while place > 0 and hashes[place - 1] == wanted:
                place -= 1
                if self._id(int(order[place])) == name:
                    found[i] = order[place]
                    break
        return found

    @functools.cached_property
    def _table(self) -> tuple[NDArray[numpy.uint64], NDArray[numpy.int64]]:
        hashes = numpy.fromiter(
            (xxhash.xxh3_64_intdigest(name.encode()) for name in self), dtype=numpy.uint64, count=len(self)
        )
        order = numpy.argsort(hashes, kind="stable")
        return hashes[order], order


def write_ids(path: Path, ids: Iterable[str]) -> int:
    """Write ids as they come (8 bytes each are held meanwhile); gives their number."""
    ends, end = array("q"), 0
    with path.open("wb") as file:
        for name in ids:
            text = name.encode()
            end += len(text)
            ends.append(end)
            file.write(text)
        file.write(numpy.asarray(ends, dtype="<i8").tobytes())
        file.write(FOOTER.pack(len(ends), MARK))
    return len(ends)
