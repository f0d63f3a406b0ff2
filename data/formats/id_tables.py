"""Ids by the million: which documents there are, and where the line of a key is, in a few bytes each.

An id is kept as 64 bits of a hash in a sorted array on disk, mapped into every process; finding one is a binary
search. Two different ids with one hash are improbable (1e-5 for the 21 million passages of Wikipedia) and are found,
because equal hashes are looked at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy

from data.formats.lines import BLOCK, Lines, decode
from data.passages import passage_id


def hash_of(text: str) -> int:
    """64 bits of a hash of an id."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def hashes_of(texts: Iterable[str]) -> numpy.ndarray:
    """Hashes (N,) uint64."""
    return numpy.fromiter(map(hash_of, texts), numpy.uint64)


class MemoryIds:
    """The documents of the memory: how many passages each was cut into (0: it is whole)."""

    def __init__(self, folder: Path) -> None:
        self._hash = numpy.load(folder / "memory-hash.npy", mmap_mode="r", allow_pickle=False)
        self._count = numpy.load(folder / "memory-count.npy", mmap_mode="r", allow_pickle=False)

    @staticmethod
    def write(folder: Path, hashes: numpy.ndarray, counts: numpy.ndarray) -> None:
        """Make the table of documents (N,) and their numbers of passages (N,)."""
        order = numpy.argsort(hashes, kind="stable")
        _save(folder / "memory-hash.npy", hashes[order])
        _save(folder / "memory-count.npy", counts[order].astype(numpy.int32))

    def ids(self, document_id: str) -> list[str]:
        """The ids under which a document of the source is in the memory; empty if it is not there."""
        wanted = numpy.uint64(hash_of(document_id))
        at = int(numpy.searchsorted(self._hash, wanted))
        if at == len(self._hash) or self._hash[at] != wanted:
            return []
        count = int(self._count[at])
        return [passage_id(document_id, number) for number in range(count)] if count else [document_id]


class LineTable:
    """The lines of a file by a key in them."""

    def __init__(self, lines: Lines, folder: Path, name: str, key: Callable[[str, str], str]) -> None:
        """Open the table, made first if it is not there.

        Args:
            name: of the table's files in ``folder``.
            key: from a line and its place to its key.
        """
        self._lines, self._key = lines, key
        files = [folder / f"{name}-{what}.npy" for what in ("hash", "offset", "number")]
        if not files[-1].exists():
            self._make(files)
        self._hash, self._offset, self._number = (numpy.load(file, mmap_mode="r", allow_pickle=False) for file in files)

    def _make(self, files: list[Path]) -> None:
        lines = self._lines
        found = numpy.fromiter(
            ((hash_of(self._key(text, lines.place(n))), offset, n) for n, offset, text in _with_offsets(lines)),
            numpy.dtype([("hash", numpy.uint64), ("offset", numpy.int64), ("number", numpy.int64)]),
        )
        found = found[numpy.argsort(found["hash"], kind="stable")]
        for file, column in zip(files, ("hash", "offset", "number"), strict=True):
            _save(file, found[column])

    def lines_of(self, key: str) -> Iterator[tuple[int, str, str]]:
        """Number, text and place of every line with a key, in the file's order."""
        wanted = numpy.uint64(hash_of(key))
        at = int(numpy.searchsorted(self._hash, wanted))
        while at < len(self._hash) and self._hash[at] == wanted:
            number = int(self._number[at])
            text, place = self._lines.at(int(self._offset[at]), number), self._lines.place(number)
            if self._key(text, place) == key:
                yield number, text, place
            at += 1


def _save(file: Path, array: numpy.ndarray) -> None:
    """Put an array in place whole or not at all."""
    temporary = file.with_suffix(".tmp")
    with temporary.open("wb") as out:
        numpy.save(out, array, allow_pickle=False)
    temporary.replace(file)


def _with_offsets(lines: Lines) -> Iterator[tuple[int, int, str]]:
    offset = 0
    with open(lines.file, "rb", buffering=BLOCK) as file:
        for number, line in enumerate(file):
            text = decode(line, lines.place(number), first=number == 0)
            if text.strip() and not (lines.header and number == 0):
                yield number, offset, text
            offset += len(line)
