"""Ranges of bytes out of many files: batched, coalesced, concurrent, with a bounded number of open files.

Training asks for some hundred small ranges at once. They are sorted by (file, first byte), ranges that touch or
nearly touch become one read, and each file is looked up once. What lies in the page cache is read at once, in the
calling thread (``preadv2`` with ``RWF_NOWAIT``: handing a read of one microsecond to a thread costs fifty); what
would block, and every file that is not open yet, goes to a few threads, so that a disk or a parallel file system
sees many requests at a time. Where the system has no ``RWF_NOWAIT``, every read goes to the threads.

Files of an fsspec file system are read by its ``cat_ranges``, which does the concurrency. A file may be replaced by
a local copy while reads go on (``replace``). Safe between threads and across fork.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_GAP = 1024  # bytes read for nothing rather than reading twice: neighbours in a tar are a header and padding apart
MAX_RUN = 8 << 20  # bytes; longer runs would be one thread's work and one buffer
NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)

Range = tuple[int, int, int]  # number of the file, first byte, end


@dataclass(slots=True)
class Run:
    """One read and the ranges it serves, as positions in what was asked."""

    file: int
    start: int
    stop: int
    wanted: list[int]


def coalesce(ranges: Sequence[Range], *, max_gap: int = MAX_GAP, max_run: int = MAX_RUN) -> list[Run]:
    """Sort ``ranges`` and join those at most ``max_gap`` bytes apart, as long as a run stays under ``max_run``."""
    runs: list[Run] = []
    file, stop, run = -1, 0, None
    for i in sorted(range(len(ranges)), key=ranges.__getitem__):
        next_file, start, end = ranges[i]
        if run is not None and next_file == file and start - stop <= max_gap and end - run.start <= max_run:
            run.wanted.append(i)
            if end > stop:
                run.stop = stop = end
        else:
            file, stop = next_file, end
            run = Run(file, start, end, [i])
            runs.append(run)
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
    ) -> None:
        """Nothing is opened before it is read.

        Args:
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
        self._open = _OpenFiles(max_open_files)
        self._pool: ThreadPoolExecutor | None = None
        self._nowait = NOWAIT
        self._lock = threading.Lock()
        self._process = os.getpid()

    def __reduce__(self) -> Any:
        if self._on_first_use is not None:
            raise TypeError("reads with a callback belong to one process; make them anew in the other")
        return _again, (self.files, self._filesystem, self._open.limit, self._num_threads)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def read(self, ranges: Sequence[Range]) -> list[bytes]:
        """The bytes of each (file number, first byte, end), in the order asked.

        Raises:
            ValueError: if a file ends inside a range.
            OSError: if a file cannot be read.
        """
        if os.getpid() != self._process:
            self._start_again()
        runs = coalesce(ranges)
        if self._on_first_use is not None:
            with self._lock:
                new = {run.file for run in runs if self._unused[run.file]}
                for file in new:
                    self._unused[file] = False
            for file in new:
                self._on_first_use(file)
        parts: list[bytes] = [b""] * len(ranges)
        local = [run for run in runs if self._local[run.file] is not None]
        if local:
            self._read_local(local, ranges, parts)
        if len(local) < len(runs):
            self._read_remote([run for run in runs if self._local[run.file] is None], ranges, parts)
        with self._lock:
            self.num_reads += len(runs)
        return parts

    def replace(self, file: int, path: str | Path) -> None:
        """Read file number ``file`` from a local copy from now on."""
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

    def _read_local(self, runs: list[Run], ranges: Sequence[Range], parts: list[bytes]) -> None:
        later: list[Run] = []
        for file, group in itertools.groupby(runs, key=lambda run: run.file):
            if self._nowait is None or file not in self._open:
                later += group
                continue
            with self._open.use(file, self._local[file]) as fd:
                for run in group:
                    data = self._read_cached(fd, run) if self._nowait is not None else None
                    if data is None:
                        later.append(run)
                    else:
                        _deal(run, data, ranges, parts)
        if len(later) == 1:
            _deal(later[0], self._read_blocking(later[0]), ranges, parts)
        elif later:
            with self._lock:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="random-reads")
            for run, data in zip(later, self._pool.map(self._read_blocking, later), strict=True):
                _deal(run, data, ranges, parts)

    def _read_cached(self, fd: int, run: Run) -> bytes | None:
        """The run if all of it is in the page cache."""
        assert self._nowait is not None
        buffer = bytearray(run.stop - run.start)
        try:
            num_bytes = os.preadv(fd, [buffer], run.start, self._nowait)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            self._nowait = None  # this file system cannot say
            return None
        return bytes(buffer) if num_bytes == len(buffer) else None

    def _read_blocking(self, run: Run) -> bytes:
        path = self._local[run.file]
        with self._open.use(run.file, path) as fd:
            data = os.pread(fd, run.stop - run.start, run.start)
            while len(data) < run.stop - run.start:  # a signal, or the end of the file
                more = os.pread(fd, run.stop - run.start - len(data), run.start + len(data))
                if not more:
                    raise ValueError(_ended(path, run))
                data += more
        return data

    def _read_remote(self, runs: list[Run], ranges: Sequence[Range], parts: list[bytes]) -> None:
        runs = [run for run in runs if run.stop > run.start]  # of an empty range, object stores would send everything
        found = self._filesystem.cat_ranges(
            [self.files[run.file] for run in runs],
            [run.start for run in runs],
            [run.stop for run in runs],
            on_error="raise",
        )
        for run, data in zip(runs, found, strict=True):
            if len(data) != run.stop - run.start:
                raise ValueError(_ended(self.files[run.file], run))
            _deal(run, data, ranges, parts)


def _again(files: list[str], filesystem: Any, max_open_files: int, num_threads: int) -> RandomReads:
    return RandomReads(files, filesystem=filesystem, max_open_files=max_open_files, num_threads=num_threads)


def _ended(path: str | None, run: Run) -> str:
    return f"{path} ends inside the range of bytes {run.start} to {run.stop}; index it again or restore it"


def _deal(run: Run, data: bytes, ranges: Sequence[Range], parts: list[bytes]) -> None:
    if len(run.wanted) == 1:
        parts[run.wanted[0]] = data
        return
    for i in run.wanted:
        _, start, stop = ranges[i]
        parts[i] = data[start - run.start : stop - run.start]


@dataclass(slots=True, eq=False)
class _OpenFile:
    fd: int = -1
    users: int = 0
    path: str = ""
    opening: threading.Lock = field(default_factory=threading.Lock)


class _OpenFiles:
    """Descriptors by number of the file; one in use is never closed, and there are never more than ``limit``."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._files: OrderedDict[int, _OpenFile] = OrderedDict()
        self._leaving: list[_OpenFile] = []  # replaced while in use; closed by the last user
        self._changed = threading.Condition(threading.Lock())

    def __len__(self) -> int:
        return len(self._files) + len(self._leaving)

    def __contains__(self, file: int) -> bool:
        return file in self._files

    @contextmanager
    def use(self, file: int, path: str | None) -> Iterator[int]:
        """The descriptor of a file, opened if it is not; waits while all are in use by others."""
        assert path is not None
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
                        entry.fd = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
            yield entry.fd
        finally:
            with self._changed:
                entry.users -= 1
                if not entry.users:
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
        child = _OpenFiles(self.limit)
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
