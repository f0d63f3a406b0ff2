"""All samples of a folder of indexed tars, by position.

Position 0 is the first sample of the first tar in sorted order, and so on to the end: what a loader's order
permutes. Reading a list of positions sorts them by place, joins neighbours into one read and keeps few files
open (`data.random_reads`), because a parallel file system is fast at long reads and slow at opens. Held in memory
is the index, some 90 bytes a sample; no file is open before it is read.

A sample that cannot be read is a `RawSample` with a ``problem``: it keeps its position, so that the order of all
others and their number never depend on what was readable. Keys are unique within a shard (`data.shard_index`);
the same key in two shards names two samples.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy
from numpy.typing import NDArray

from data.image_formats import EXTENSIONS, Unread
from data.random_reads import RandomReads
from data.shard_index import ShardIndex
from data.shards import fingerprint, load_index, shard_paths

MAX_SAMPLE_BYTES = 128 << 20
MAX_SKIPPED = 64 << 10  # bytes; what is not needed and no longer is read ahead with what lies around it
_OPENING_THREADS = 16


@dataclass(frozen=True)
class RawSample:
    """One sample as it lies in its shard.

    Attributes:
        key: the path of its members up to the first dot of the file name.
        members: extension -> bytes (or `data.image_formats.Unread`); empty if the sample has a problem.
        shard: the tar it lies in.
        problem: why it cannot be used, or None.
    """

    key: str
    members: dict[str, bytes]
    shard: Path
    problem: str | None = None


class ShardSet:
    """The samples of all ``*.tar`` of a folder. Safe between threads and across fork.

    Attributes:
        indices: one a shard.
        shard_sizes: samples of each shard.
        reads: the files and how often they were read.
    """

    def __init__(
        self, directory: str | Path, *, max_open_files: int = 64, max_sample_bytes: int = MAX_SAMPLE_BYTES
    ) -> None:
        """Load the indices of a folder.

        Args:
            max_open_files: at most so many shards are open at a time.
            max_sample_bytes: a larger sample is not read; that is its problem.

        Raises:
            FileNotFoundError: the folder has no ``*.tar``.
            ValueError: a tar has no index, or has changed since; the message says what to do.
        """
        self.directory = Path(directory)
        tars = shard_paths(self.directory)
        if not tars:
            raise FileNotFoundError(f"{self.directory} holds no shards (*.tar)")
        with ThreadPoolExecutor(_OPENING_THREADS) as pool:  # opens are slow, and slow beside each other
            self.indices: list[ShardIndex] = list(pool.map(load_index, tars))
        self.shard_sizes: list[int] = [len(index) for index in self.indices]
        self.reads = RandomReads(tars, max_open_files=max_open_files)
        self._ends = numpy.cumsum(self.shard_sizes)
        self._max_sample_bytes = max_sample_bytes

    def __len__(self) -> int:
        return int(self._ends[-1])

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the shards' checksums in their order: names and dates do not count."""
        return fingerprint(index.sha256 for index in self.indices)

    def key(self, position: int) -> str:
        shard, row = self._place(position)
        return self.indices[shard].key(row)

    def shard(self, position: int) -> Path:
        """The tar that a sample lies in."""
        return self.indices[self._place(position)[0]].tar

    def keys(self) -> Iterator[str]:
        """The keys of all samples, by position."""
        for index in self.indices:
            yield from index.keys()

    def read(self, positions: Sequence[int], *, pictures: Sequence[bool] | None = None) -> list[RawSample]:
        """The samples at ``positions``, in that order; IndexError for a position that does not exist.

        Args:
            pictures: whose pictures are read, a bool each. Of the others a picture is an `Unread`; so is one that
                cannot be read, where the rest can. None: all are read, and what cannot be is the sample's problem.
        """
        places = [self._place(position) for position in positions]
        members = [self.indices[shard].members(row) for shard, row in places]
        problems = [self._problem(place, found) for place, found in zip(places, members, strict=True)]
        wanted: list[tuple[int, int, int]] = []
        owners: list[tuple[int, str]] = []
        contents: list[dict[str, bytes]] = [{} for _ in places]
        for i, (shard, _) in enumerate(places):
            if problems[i] is None:
                for extension, (offset, size) in members[i].items():
                    if pictures is None or pictures[i] or extension not in EXTENSIONS:
                        wanted.append((shard, offset, offset + size))
                        owners.append((i, extension))
                    else:
                        contents[i][extension] = Unread()
        for (i, extension), data in zip(owners, self._read_ranges(wanted), strict=True):
            if isinstance(data, bytes):
                contents[i][extension] = data
            elif pictures is not None and extension in EXTENSIONS:
                contents[i][extension] = Unread(data.reason)
            else:
                problems[i] = data.reason
        return [
            RawSample(self.indices[shard].key(row), {} if problem else found, self.indices[shard].tar, problem)
            for (shard, row), found, problem in zip(places, contents, problems, strict=True)
        ]

    def will_need(self, positions: range, *, pictures: bool = True) -> None:
        """Ask the system to read ahead what lies at consecutive positions; see `RandomReads.will_need`.

        Args:
            pictures: False: not the pictures, but for small ones that lie between.
        """
        position = positions.start
        while position < positions.stop:
            shard, row = self._place(position)
            rows = min(positions.stop - position, self.shard_sizes[shard] - row)
            index = self.indices[shard]
            members = slice(int(index.member_ends[row - 1]) if row else 0, int(index.member_ends[row + rows - 1]))
            starts, stops = index.offsets[members], index.offsets[members] + index.sizes[members]
            if not pictures:
                skipped = [i for i, extension in enumerate(index.extensions) if extension in EXTENSIONS]
                others = ~numpy.isin(index.extension_numbers[members], skipped)
                starts, stops = starts[others], stops[others]
            for start, stop in _joined(starts, stops, max_gap=MAX_SKIPPED):
                self.reads.will_need(shard, start, stop)
            position += rows

    def close(self) -> None:
        """Close all files; the next read opens them again."""
        self.reads.close()

    def _place(self, position: int) -> tuple[int, int]:
        """Shard and row of a position."""
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} does not exist; {self.directory} holds {len(self)} samples")
        shard = int(numpy.searchsorted(self._ends, position, side="right"))
        return shard, position - (int(self._ends[shard - 1]) if shard else 0)

    def _problem(self, place: tuple[int, int], members: dict[str, tuple[int, int]]) -> str | None:
        problem = self.indices[place[0]].problem(place[1])
        if problem is None and sum(size for _, size in members.values()) > self._max_sample_bytes:
            return f"more than {self._max_sample_bytes} bytes"
        return problem

    def _read_ranges(self, wanted: list[tuple[int, int, int]]) -> Sequence[bytes | _Unreadable]:
        try:
            return self.reads.read(wanted)
        except (OSError, ValueError):  # one bad file must not cost the whole batch: find out which
            return [self._read_range(one) for one in wanted]

    def _read_range(self, wanted: tuple[int, int, int]) -> bytes | _Unreadable:
        try:
            return self.reads.read([wanted])[0]
        except ValueError:
            return _Unreadable("the shard has become shorter")
        except OSError as error:
            return _Unreadable(f"unreadable shard: {error.strerror}")


def _joined(starts: NDArray[numpy.int64], stops: NDArray[numpy.int64], *, max_gap: int) -> Iterator[tuple[int, int]]:
    """The ranges in order, those at most ``max_gap`` apart as one."""
    order = numpy.argsort(starts)
    starts, stops = starts[order], numpy.maximum.accumulate(stops[order])
    last = numpy.append(starts[1:] - stops[:-1] > max_gap, True) if len(starts) else numpy.zeros(0, bool)
    first = numpy.roll(last, 1)
    yield from zip(starts[first].tolist(), stops[last].tolist(), strict=True)


@dataclass(frozen=True)
class _Unreadable:
    reason: str
