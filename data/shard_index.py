"""The byte-offset index of one tar: where every member of every sample lies, in a few flat arrays.

A sample of img2dataset has three members and a data set has thousands of tars of ten thousand samples, so an
index is neither a dictionary nor JSON: keys are one run of bytes, offsets and sizes are int64, an extension is a
number. That is some 90 bytes a sample with three members, on disk as in memory, and opening a tar's index is one
read. The file is safetensors: checked lengths, no pickles. The price is that a key is found by a dictionary that
is built when the first key is asked for; who reads by position (`data.shard_set`) never needs it.

A *sample* is the members that share a key, the path up to the first dot of the file name (``a/b.json`` and
``a/b.png`` are ``json`` and ``png`` of sample ``a/b``), as WebDataset defines it. A sample that cannot be read as
the tar's author meant it keeps its row, with a *problem* instead of members: rows are positions, and a row that
vanished would shift every later sample. What cannot be a sample at all (no extension) is counted in ``ignored``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import urllib.parse
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from data.tar_members import CUT_OFF, FILE, FOLDER, SPARSE, UNKNOWN, Member, TarWalk

FORMAT = 2
SUFFIX = ".index.safetensors"

UNSAFE_PATH = "unsafe path"
NOT_UTF8 = "name is not UTF-8"
REPEATED_MEMBER = "duplicate key"
NOT_ADJACENT = "members are not adjacent"
CUT = "cut off at the end of the tar"


@dataclass(frozen=True)
class ShardIndex:
    """Where the members of one tar lie. Rows are samples in the order of the tar.

    Attributes:
        tar: the shard.
        size: its size (bytes).
        mtime_ns: its time of modification when it was indexed.
        sha256: its checksum; shards are told apart by contents, never by date.
        ignored: what the tar holds that is not part of a sample, by reason.
        unread_bytes: bytes at its end that are not read: of a file that is cut off, or behind damage.
        unread_reason: why, or empty.
        key_bytes: the UTF-8 keys of all rows, one after another (uint8).
        key_ends: where each key ends in ``key_bytes`` (int64, one a row).
        key_hashes: `key_hash` of each key (uint64, one a row).
        member_ends: where each row's members end in the next three arrays (int64, one a row).
        offsets: first byte of each member's data in the tar (int64).
        sizes: bytes of each member (int64).
        extension_numbers: extension of each member, as a place in ``extensions`` (uint32).
        extensions: the extensions of all members, in lower case.
        problem_numbers: 0, or 1 + the place in ``problems`` of what is wrong with the row (uint8).
        problems: what is wrong with rows.
    """

    tar: Path
    size: int
    mtime_ns: int
    sha256: str
    ignored: Mapping[str, int]
    unread_bytes: int
    unread_reason: str
    key_bytes: NDArray[numpy.uint8]
    key_ends: NDArray[numpy.int64]
    key_hashes: NDArray[numpy.uint64]
    member_ends: NDArray[numpy.int64]
    offsets: NDArray[numpy.int64]
    sizes: NDArray[numpy.int64]
    extension_numbers: NDArray[numpy.uint32]
    extensions: tuple[str, ...]
    problem_numbers: NDArray[numpy.uint8]
    problems: tuple[str, ...]

    def __len__(self) -> int:
        """Number of samples, those with a problem included."""
        return len(self.key_ends)

    @property
    def num_ignored(self) -> int:
        return sum(self.ignored.values())

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return sum(getattr(self, name).nbytes for name in _ARRAYS)

    def key(self, row: int) -> str:
        start = int(self.key_ends[row - 1]) if row else 0
        return self.key_bytes[start : int(self.key_ends[row])].tobytes().decode()

    def keys(self) -> Iterator[str]:
        text, start = self.key_bytes.tobytes(), 0
        for end in self.key_ends.tolist():
            yield text[start:end].decode()
            start = end

    def members(self, row: int) -> dict[str, tuple[int, int]]:
        """Extension -> (offset, size) of the members of a row; empty if the row has a problem."""
        if self.problem_numbers[row]:
            return {}
        places = slice(int(self.member_ends[row - 1]) if row else 0, int(self.member_ends[row]))
        numbers, offsets, sizes = self.extension_numbers[places], self.offsets[places], self.sizes[places]
        places_by_number = zip(numbers.tolist(), offsets.tolist(), sizes.tolist(), strict=True)
        return {self.extensions[number]: (offset, size) for number, offset, size in places_by_number}

    def problem(self, row: int) -> str | None:
        """What is wrong with a row, or None."""
        number = int(self.problem_numbers[row])
        return self.problems[number - 1] if number else None

    @property
    def bad_samples(self) -> dict[str, int]:
        """Rows with a problem, by problem."""
        numbers, counts = numpy.unique(self.problem_numbers, return_counts=True)
        return {self.problems[n - 1]: c for n, c in zip(numbers.tolist(), counts.tolist(), strict=True) if n}

    @functools.cached_property
    def samples(self) -> Samples:
        """The same by key."""
        return Samples(self)

    def to_bytes(self) -> bytes:
        """The index file; the same index gives the same bytes."""
        header = {
            "format": FORMAT, "tar": self.tar.name, "size": self.size, "mtime_ns": self.mtime_ns,
            "sha256": self.sha256, "ignored": dict(self.ignored), "unread_bytes": self.unread_bytes,
            "unread_reason": self.unread_reason, "extensions": self.extensions, "problems": self.problems,
        }  # fmt: skip
        # A tensor, not the metadata of safetensors, which come out in another order each time.
        header_bytes = numpy.frombuffer(json.dumps(header).encode(), dtype=numpy.uint8)
        return safetensors.numpy.save({"header": header_bytes} | {name: getattr(self, name) for name in _ARRAYS})

    @staticmethod
    def from_bytes(data: bytes, tar: Path) -> ShardIndex:
        """The index of ``tar`` from the bytes of its file; ValueError if they are not an index of this format."""
        try:
            arrays: dict[str, Any] = safetensors.numpy.load(data)
            header: dict[str, Any] = json.loads(arrays.pop("header").tobytes())
            if header.pop("format") != FORMAT:
                raise ValueError("another format")
            header["tar"] = tar
            header["extensions"], header["problems"] = tuple(header["extensions"]), tuple(header["problems"])
            index = ShardIndex(**header, **arrays)
            index._check()
        except (SafetensorError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not a shard index of format {FORMAT}: {error}") from error
        return index

    def _check(self) -> None:
        """ValueError if the arrays do not fit each other: a damaged index must not read a wrong place."""
        for name, dtype in _ARRAYS.items():
            if getattr(self, name).dtype != dtype or getattr(self, name).ndim != 1:
                raise ValueError(f"{name} is not an array of {dtype}")
        rows = {len(self.key_ends), len(self.key_hashes), len(self.member_ends), len(self.problem_numbers)}
        members = {len(self.offsets), len(self.sizes), len(self.extension_numbers)}
        if len(rows) > 1 or len(members) > 1:
            raise ValueError("its arrays differ in length")
        for ends, last in ((self.key_ends, len(self.key_bytes)), (self.member_ends, len(self.offsets))):
            if (numpy.diff(ends, prepend=0) < 0).any() or (ends[-1] if len(ends) else 0) != last:
                raise ValueError("its rows do not add up")
        stored = (self.offsets >= 0) & (self.sizes >= 0) & (self.sizes <= self.size)
        if not (stored & (self.offsets <= self.size - self.sizes)).all():
            raise ValueError("a member lies outside the tar")
        if (self.extension_numbers >= len(self.extensions)).any() or (self.problem_numbers > len(self.problems)).any():
            raise ValueError("it names an extension or a problem that it does not list")


_ARRAYS = {
    "key_bytes": numpy.uint8, "key_ends": numpy.int64, "key_hashes": numpy.uint64, "member_ends": numpy.int64,
    "offsets": numpy.int64, "sizes": numpy.int64, "extension_numbers": numpy.uint32, "problem_numbers": numpy.uint8,
}  # fmt: skip


class Samples(Mapping[str, Mapping[str, tuple[int, int]]]):
    """Key -> {extension: (offset, size)}, in the order of the tar; nothing in a sample that has a problem."""

    def __init__(self, index: ShardIndex) -> None:
        self._index = index

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[str]:
        return self._index.keys()

    def __getitem__(self, key: str) -> dict[str, tuple[int, int]]:
        return self._index.members(self._rows[key])

    @functools.cached_property
    def _rows(self) -> dict[str, int]:
        return {key: row for row, key in enumerate(self._index.keys())}


def key_hash(key: str) -> int:
    """64 bits of BLAKE2b of a key, as an unsigned integer: equal in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


def split_key(name: str) -> tuple[str, str] | None:
    """``(key, extension)`` of a member's path, or None if the path is not safe or has no extension."""
    split = _split(name)
    return None if split is None or unsafe(name) else split


def unsafe(name: str) -> str | None:
    """Why a path must never become one of a file system or a line of a log, or None."""
    if name.isascii() and name.isprintable():
        control = False
    else:
        try:
            name.encode()
        except UnicodeEncodeError:
            return NOT_UTF8
        control = any(character < " " or character == "\x7f" for character in name)
    return UNSAFE_PATH if control or name.startswith("/") or "\\" in name or ".." in name.split("/") else None


def _split(name: str) -> tuple[str, str] | None:
    path = name.removeprefix("./")
    folder, _, base = path.rpartition("/")
    stem, dot, ext = base.partition(".")
    if not stem or not dot or not ext:
        return None
    return (f"{folder}/{stem}" if folder else path[: len(path) - len(base)] + stem), ext.lower()


class _Rows:
    """The rows of an index while its tar goes by."""

    def __init__(self) -> None:
        self.ignored: Counter[str] = Counter()
        self.key_bytes = bytearray()
        self.key_ends, self.key_hashes, self.member_ends = array("q"), array("Q"), array("q")
        self.offsets, self.sizes, self.extension_numbers = array("q"), array("q"), array("I")
        self.problem_numbers = array("B")
        self.extensions: dict[str, int] = {}
        self.problems: dict[str, int] = {}
        self._rows: dict[str, int] = {}  # key -> row
        self._key: str | None = None  # of the row that members are added to
        self._present: set[str] = set()  # its extensions

    def add(self, member: Member) -> None:
        if member.kind == FOLDER:
            return
        split = _split(member.name)
        if split is None or member.kind == UNKNOWN:
            self.ignored["no extension" if split is None else member.kind] += 1
            return
        key, extension = split
        problem = unsafe(member.name)
        if problem is not None:  # the key must not be a path, nor undecodable, wherever it is used later
            key = urllib.parse.quote(key, safe="", errors="surrogateescape")
            extension = "unsafe"
        elif member.kind == CUT_OFF:
            problem = CUT
        elif member.kind != FILE:
            problem = member.kind if member.kind == SPARSE else f"{member.kind} instead of a file"
        if key != self._key:
            if key in self._rows:
                self._mark(self._rows[key], NOT_ADJACENT)
                self._key = None  # whatever else it has here is not added either
                return
            self._open(key)
        row = self._rows[key]
        if extension in self._present and problem is None:
            problem = REPEATED_MEMBER
        if problem is not None:
            self._mark(row, problem)
            return
        self._present.add(extension)
        self.offsets.append(member.offset)
        self.sizes.append(member.size)
        self.extension_numbers.append(self.extensions.setdefault(extension, len(self.extensions)))
        self.member_ends[row] = len(self.offsets)

    def mark_last(self, problem: str) -> None:
        if self.key_ends:
            self._mark(len(self.key_ends) - 1, problem)

    def _open(self, key: str) -> None:
        self._rows[key] = len(self.key_ends)
        self._key, self._present = key, set()
        self.key_bytes += key.encode()
        self.key_ends.append(len(self.key_bytes))
        self.key_hashes.append(key_hash(key))
        self.member_ends.append(len(self.offsets))
        self.problem_numbers.append(0)

    def _mark(self, row: int, problem: str) -> None:
        if not self.problem_numbers[row]:
            self.problem_numbers[row] = self.problems.setdefault(problem, len(self.problems) + 1)


def build_index(tar: Path) -> ShardIndex:
    """Pass once over ``tar`` (any tar, also one that others made).

    Raises:
        ValueError: it is not an uncompressed tar, or it changed meanwhile.
    """
    checksum = hashlib.sha256()
    rows = _Rows()
    with tar.open("rb", buffering=0) as file:
        before = os.fstat(file.fileno())
        walk = TarWalk(file, update=checksum.update)
        try:
            for member in walk:
                rows.add(member)
        except ValueError as error:
            raise ValueError(f"{tar} is not a readable uncompressed tar: {error}") from error
        after = os.fstat(file.fileno())
    if walk.lost:
        rows.mark_last(CUT)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or walk.size != after.st_size:
        raise ValueError(f"{tar} changed while it was indexed; index it again when nothing writes to it")
    arrays = {name: numpy.array(getattr(rows, name), dtype=dtype) for name, dtype in _ARRAYS.items()}
    return ShardIndex(
        tar=tar, size=walk.size, mtime_ns=after.st_mtime_ns, sha256=checksum.hexdigest(), ignored=dict(rows.ignored),
        unread_bytes=max(0, walk.size - walk.end), unread_reason=walk.reason, extensions=tuple(rows.extensions),
        problems=tuple(rows.problems), **arrays,
    )  # fmt: skip
