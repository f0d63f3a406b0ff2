"""Ranges of bytes out of many files: batched, coalesced, concurrent, with a bounded number of open files.

Training asks for some hundred small ranges at once. They are sorted by (file, first byte), ranges that touch or
nearly touch become one read, and each file is looked up once. What lies in the page cache is read at once, in the
calling thread (``preadv2`` with ``RWF_NOWAIT``: handing a read of one microsecond to a thread costs fifty); what
would block goes to a few threads, so that a disk or a parallel file system sees many requests at a time. So do files
that have to be opened, unless the opens before were as fast as a local disk's. Where the system has no
``RWF_NOWAIT``, every read goes to the threads.

A local file that has to be opened again must be of the size and time that it had when it was opened first: a shard that
is replaced in the middle of a run would give bytes of other samples. (A descriptor that stays open still reads the old
file.)

Files of an fsspec file system are read by its ``cat_ranges``, which does the concurrency. A file may be replaced by
a local copy while reads go on (``replace``). Safe between threads and across fork.
"""

from __future__ import annotations

import errno
import itertools
import operator
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

MAX_GAP = 1024  # bytes read for nothing rather than reading twice: neighbours in a tar are a header and padding apart
ADVICE = 128 << 10  # bytes; of a longer piece of advice the kernel may heed the beginning only
FAST_OPEN_S = 100e-6  # opens that take less on average are done by the calling thread
MAX_RUN = 8 << 20  # bytes; longer runs would be one thread's work and one buffer
NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)

Range = tuple[int, int, int]  # number of the file, first byte, end
Run = tuple[
    int, int, int, list[int]
]  # one read: file, first byte, end; and the ranges it serves, as places in what was asked


def coalesce(
    ranges: Sequence[Range] | NDArray[numpy.int64], *, max_gap: int = MAX_GAP, max_run: int = MAX_RUN
) -> list[Run]:
    """Sort ``ranges`` and join those at most ``max_gap`` bytes apart, as long as a run stays under ``max_run``."""
    asked = numpy.asarray(ranges, dtype=numpy.int64).reshape(-1, 3)
    order = numpy.lexsort((asked[:, 2], asked[:, 1], asked[:, 0]))
    file, start, stop = asked[order].T
    near = (file[1:] == file[:-1]) & (start[1:] - stop[:-1] <= max_gap)
    if not near.any():  # the usual case, and no loop over it
        return list(zip(file.tolist(), start.tolist(), stop.tolist(), order[:, None].tolist(), strict=True))
    runs: list[Run] = []
    for i, next_file, next_start, next_stop in zip(
        order.tolist(), file.tolist(), start.tolist(), stop.tolist(), strict=True
    ):
        if runs:
            last_file, first, end, wanted = runs[-1]
            if next_file == last_file and next_start - end <= max_gap and next_stop - first <= max_run:
                wanted.append(i)
                if next_stop > end:
                    runs[-1] = (last_file, first, next_stop, wanted)
                continue
        runs.append((next_file, next_start, next_stop, [i]))
    return runs


class RandomReads:
    """Random access to a fixed list of files.

    Attributes:
        files: their paths, in the file system's spelling.
        num_reads: reads so far; one run of neighbours counts once.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        *,
        filesystem: Any = None,
        max_open_files: int = 64,
        num_threads: int = 16,
        on_first_use: Callable[[int], None] | None = None,
        may_grow: Collection[int] = (),
    ) -> None:
        """Nothing is opened before it is read.

        Args:
            may_grow: numbers of files that somebody appends to.
            filesystem: an ``fsspec.AbstractFileSystem`` that holds the files; None for local paths.
            max_open_files: descriptors held at most; the least recently used is closed first.
            num_threads: reads in flight at most.
            on_first_use: called with the number of a file before its first read.
        """
        if max_open_files < 1 or num_threads < 1:
            raise ValueError(f"max_open_files is {max_open_files}, num_threads {num_threads}; both must be at least 1")
        self.files = [str(file) for file in files]
        self.num_reads = 0
        self._filesystem = filesystem
        self._local: list[str | None] = list(self.files) if filesystem is None else [None] * len(self.files)
        self._num_threads = num_threads
        self._on_first_use = on_first_use
        self._unused = [True] * len(self.files) if on_first_use else []
        self._may_grow = frozenset(may_grow)
        unchanging = () if filesystem is not None else (f for i, f in enumerate(self.files) if i not in self._may_grow)
        self._open = _OpenFiles(max_open_files, unchanging=frozenset(unchanging))
        self._pool: ThreadPoolExecutor | None = None
        self._nowait = NOWAIT
        self._lock = threading.Lock()
        self._process = os.getpid()

    def __reduce__(self) -> Any:
        if self._on_first_use is not None:
            raise TypeError("reads with a callback belong to one process; make them anew in the other")
        return _again, (self.files, self._filesystem, self._open.limit, self._num_threads, self._may_grow)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def read(self, ranges: Sequence[Range] | NDArray[numpy.int64]) -> list[bytes]:
        """The bytes of each (file number, first byte, end), in the order asked; ranges (N, 3) may be an array.

        Raises:
            ValueError: if a file ends inside a range.
            OSError: if a file cannot be read.
        """
        if os.getpid() != self._process:
            self._start_again()
        runs = coalesce(ranges)
        if self._on_first_use is not None:
            with self._lock:
                new = {file for file, *_ in runs if self._unused[file]}
                for file in new:
                    self._unused[file] = False
            for file in new:
                self._on_first_use(file)
        parts: list[bytes] = [b""] * len(ranges)
        local = runs if self._filesystem is None else [run for run in runs if self._local[run[0]] is not None]
        if local:
            self._read_local(local, ranges, parts)
        if len(local) < len(runs):
            self._read_remote([run for run in runs if self._local[run[0]] is None], ranges, parts)
        with self._lock:
            self.num_reads += len(runs)
        return parts

    def will_need(self, file: int, start: int, stop: int) -> None:
        """Ask the system to read ahead bytes ``start`` to ``stop`` of a local file; nothing is waited for or promised.

        Where opens are slow a thread does it. What cannot be read says so when it is read.
        """
        path = self._local[file]
        if path is None or not hasattr(os, "posix_fadvise"):
            return
        if os.getpid() != self._process:
            self._start_again()
        if self._open.opens_fast or self._open.is_open(file):
            self._advise(file, path, start, stop)
        else:
            self._threads().submit(self._advise, file, path, start, stop)

    def _advise(self, file: int, path: str, start: int, stop: int) -> None:
        with suppress(OSError):
            entry = self._open.take(file, path)
            try:
                for begin in range(start, stop, ADVICE):
                    os.posix_fadvise(entry.fd, begin, min(ADVICE, stop - begin), os.POSIX_FADV_WILLNEED)
            finally:
                self._open.give_back(file, entry)

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="random-reads")
            return self._pool

    def replace(self, file: int, path: str | Path) -> None:
        """Read file number ``file`` from a local copy from now on, as long as the copy is there."""
        self._local[file] = str(path)
        self._open.forget(file)

    def close(self) -> None:
        """Close all files, when no read is under way."""
        if os.getpid() == self._process and self._pool is not None:
            self._pool.shutdown()
        self._pool = None
        self._open.close()

    def __del__(self) -> None:
        if hasattr(self, "_process") and os is not None:
            if self._pool is not None:
                self._pool.shutdown(wait=False)
            self._open.close()

    def _start_again(self) -> None:
        """In a child of fork: descriptors are good, threads are gone, locks may be held by nobody."""
        self._lock = threading.Lock()
        self._pool = None
        self._open = self._open.of_child()
        self._process = os.getpid()

    def _read_local(self, runs: list[Run], ranges: _Ranges, parts: list[bytes]) -> None:
        later: list[Run] = []
        for file, group in itertools.groupby(runs, key=operator.itemgetter(0)):
            entry = None if self._nowait is None else self._open.borrow(file)
            path = self._local[file]
            if entry is None and self._nowait is not None and path is not None and self._open.opens_fast:
                with suppress(FileNotFoundError):  # a copy that somebody removed: `_read_blocking` knows what then
                    entry = self._open.take(file, path)
            if entry is None:
                later += group
                continue
            fd, flags = entry.fd, self._nowait
            try:
                for run in group:
                    _, start, stop, wanted = run
                    buffer = bytearray(stop - start)
                    try:  # all of it, if it is in the page cache
                        num_bytes = -1 if flags is None else os.preadv(fd, (buffer,), start, flags)
                    except BlockingIOError:
                        num_bytes = -1
                    except OSError as error:
                        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                            raise
                        num_bytes, flags, self._nowait = -1, None, None  # this file system cannot say
                    if num_bytes != stop - start:
                        later.append(run)
                    elif len(wanted) == 1:
                        parts[wanted[0]] = bytes(buffer)
                    else:
                        _deal(run, bytes(buffer), ranges, parts)
            finally:
                self._open.give_back(file, entry)
        if len(later) == 1:
            _deal(later[0], self._read_blocking(later[0]), ranges, parts)
        elif later:
            for run, data in zip(later, self._threads().map(self._read_blocking, later), strict=True):
                _deal(run, data, ranges, parts)

    def _read_blocking(self, run: Run) -> bytes:
        path = self._local[run[0]]
        if path is None:  # it was a copy a moment ago
            return self._read_source(run)
        try:
            return self._read_file(path, run)
        except FileNotFoundError:
            source = None if self._filesystem is not None else self.files[run[0]]
            if path == source:
                raise
            self._local[run[0]] = source  # somebody removed the copy
            return self._read_blocking(run)

    def _read_file(self, path: str, run: Run) -> bytes:
        file, start, stop, _ = run
        entry = self._open.take(file, path)
        try:
            data = os.pread(entry.fd, stop - start, start)
            while len(data) < stop - start:  # a signal, or the end of the file
                more = os.pread(entry.fd, stop - start - len(data), start + len(data))
                if not more:
                    raise ValueError(_ended(path, run))
                data += more
            return data
        finally:
            self._open.give_back(file, entry)

    def _read_source(self, run: Run) -> bytes:
        part = [b""]
        self._read_remote([(*run[:3], [0])], [run[:3]], part)
        return part[0]

    def _read_remote(self, runs: list[Run], ranges: _Ranges, parts: list[bytes]) -> None:
        # of an empty range, object stores would send everything
        runs = [run for run in runs if run[2] > run[1]]
        files, starts, stops = [self.files[run[0]] for run in runs], [run[1] for run in runs], [run[2] for run in runs]
        found = self._filesystem.cat_ranges(files, starts, stops, on_error="raise")
        for run, data in zip(runs, found, strict=True):
            if len(data) != run[2] - run[1]:
                raise ValueError(_ended(self.files[run[0]], run))
            _deal(run, data, ranges, parts)


_Ranges = Sequence[Range] | NDArray[numpy.int64]


def _again(
    files: list[str], filesystem: Any, max_open_files: int, num_threads: int, may_grow: Collection[int]
) -> RandomReads:
    return RandomReads(
        files, filesystem=filesystem, max_open_files=max_open_files, num_threads=num_threads, may_grow=may_grow
    )


def _ended(path: str, run: Run) -> str:
    return f"{path} ends inside the range of bytes {run[1]} to {run[2]}; index it again or restore it"


def _deal(run: Run, data: bytes, ranges: _Ranges, parts: list[bytes]) -> None:
    _, begin, end, wanted = run
    for i in wanted:
        _, start, stop = ranges[i]
        parts[i] = data if (start, stop) == (begin, end) else data[start - begin : stop - begin]


@dataclass(slots=True, eq=False)
class _OpenFile:
    fd: int = -1
    users: int = 0
    path: str = ""
    opening: threading.Lock = field(default_factory=threading.Lock)


class _OpenFiles:
    """Descriptors by number of the file; one in use is never closed, and there are never more than ``limit``.

    Those of ``unchanging`` paths are refused once they are not what they were when they were opened first.
    """

    def __init__(self, limit: int, *, unchanging: frozenset[str]) -> None:
        self.limit, self._unchanging = limit, unchanging
        self._seen: dict[str, tuple[int, int]] = {}  # size and time of the unchanging ones
        self._open_s = 10 * FAST_OPEN_S  # of the opens before, the later ones counting more; unknown is slow
        self._files: OrderedDict[int, _OpenFile] = OrderedDict()
        self._leaving: list[_OpenFile] = []  # replaced while in use; closed by the last user
        self._changed = threading.Condition(threading.Lock())

    def __len__(self) -> int:
        return len(self._files) + len(self._leaving)

    @property
    def opens_fast(self) -> bool:
        return self._open_s < FAST_OPEN_S

    def is_open(self, file: int) -> bool:
        entry = self._files.get(file)
        return entry is not None and entry.fd >= 0

    def borrow(self, file: int) -> _OpenFile | None:
        """The file if it is open already; to be given back."""
        with self._changed:
            entry = self._files.get(file)
            if entry is None or entry.fd < 0:
                return None
            entry.users += 1
            self._files.move_to_end(file)
            return entry

    def take(self, file: int, path: str) -> _OpenFile:
        """The file, opened if it is not; waits while all others are in use. To be given back."""
        with self._changed:
            while (entry := self._files.get(file)) is None and not self._make_room():
                self._changed.wait()
            if entry is None:
                entry = self._files[file] = _OpenFile(path=path)
            entry.users += 1
            self._files.move_to_end(file)
        try:
            if entry.fd < 0:
                with entry.opening:  # not under the common lock: an open may take milliseconds
                    if entry.fd < 0:
                        # The caller's path: another reader may have made this entry for a copy that is gone.
                        start = time.perf_counter()
                        entry.fd, entry.path = self._opened(path), path
                        self._open_s += (min(time.perf_counter() - start, 10 * FAST_OPEN_S) - self._open_s) / 8
        except BaseException:
            self.give_back(file, entry)
            raise
        return entry

    def _opened(self, path: str) -> int:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if path in self._unchanging:
            stat = os.fstat(fd)
            is_now = stat.st_size, stat.st_mtime_ns
            if self._seen.setdefault(path, is_now) != is_now:
                os.close(fd)
                raise OSError(errno.ESTALE, "changed since it was opened first", path)
        return fd

    def give_back(self, file: int, entry: _OpenFile) -> None:
        with self._changed:
            entry.users -= 1
            if entry.users:
                return
            if entry in self._leaving:
                self._leaving.remove(entry)
                _close(entry)
            elif entry.fd < 0 and self._files.get(file) is entry:  # could not be opened
                del self._files[file]
            self._changed.notify()

    def _make_room(self) -> bool:
        if len(self) < self.limit:
            return True
        idle = next((file for file, entry in self._files.items() if not entry.users), None)
        if idle is None:
            return False
        _close(self._files.pop(idle))
        return True

    def forget(self, file: int) -> None:
        """Let go of a file whose path has changed; reads under way end as they began."""
        with self._changed:
            entry = self._files.pop(file, None)
            if entry is not None and entry.users:
                self._leaving.append(entry)
            elif entry is not None:
                _close(entry)
                self._changed.notify()

    def of_child(self) -> _OpenFiles:
        """The same descriptors in a child of fork, used by nobody yet."""
        child = _OpenFiles(self.limit, unchanging=self._unchanging)
        child._seen = self._seen
        child._files = OrderedDict((n, _OpenFile(e.fd, 0, e.path)) for n, e in self._files.items() if e.fd >= 0)
        return child

    def close(self) -> None:
        for entry in (*self._files.values(), *self._leaving):
            _close(entry)
        self._files.clear()
        self._leaving.clear()


def _close(entry: _OpenFile) -> None:
    if entry.fd >= 0:
        os.close(entry.fd)
        entry.fd = -1
