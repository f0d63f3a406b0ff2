"""Copies of a store's shards on a disk of this node, made while they are read from where they are.

The first read of a shard asks for its copy; a thread makes it, and reads go to the source until it is there, so that
no step ever waits for gigabytes. A copy is named by the SHA-256 that the index knows, written to a temporary file,
flushed, and renamed when size and checksum are right; the processes of a node share the copies and one of them makes
each. A copy found from earlier is believed after its size and checksum were compared (by the same thread), else it is
replaced.

The folder is bounded. What goes first are the copies, least recently used, of stores that no process has open: copies
in use never make room for each other, because random reads would then fetch every shard over and over. What does not
fit stays at the source. All this is counted, and said.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import queue
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from data.folder import sync_folder

_CHUNK = 4 << 20  # bytes


@dataclass(frozen=True)
class Source:
    """What a copy is made of: its checksum, its size in bytes, and how to open it."""

    sha256: str
    size: int
    open: Callable[[], BinaryIO]


class LocalCache:
    """The copies of one store in a folder that is shared with other processes and stores.

    Attributes:
        counts: what happened: copies ``made``, ``found``, ``replaced`` (damaged), without ``room``.
    """

    def __init__(self, directory: str | Path, *, store: str, max_bytes: int) -> None:
        """Make the folder, and keep the store's copies in it from being removed while this object lives.

        Args:
            store: the store's fingerprint.
            max_bytes: of all copies in the folder, other stores' included.
        """
        if max_bytes < 1:
            raise ValueError(f"the cache's max_bytes is {max_bytes}; it must be at least 1")
        self.directory, self.max_bytes = Path(directory), max_bytes
        self.counts: Counter[str] = Counter()
        self._folder = self.directory / "shards" / store[:32]
        self._folder.mkdir(parents=True, exist_ok=True)
        self._in_use = (self._folder / ".in-use").open("a+b")
        fcntl.flock(self._in_use, fcntl.LOCK_SH)

    def path(self, source: Source) -> Path:
        return self._folder / f"{source.sha256}.tar"

    def get(self, source: Source) -> Path | None:
        """A copy whose size and checksum are right, made if there is none; None if there is no room for it.

        Raises:
            ValueError: the source does not have its checksum.
            OSError: it cannot be read, or the folder not be written.
        """
        temporary = self.path(source).with_suffix(".tmp")
        while True:
            if self._is_right(source):
                self.counts["found"] += 1
                return self.path(source)
            # not opened for appending, where pwrite would heed no offset
            with open(os.open(temporary, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0) as file:
                if not self._begin(source, temporary, file):
                    fcntl.flock(file, fcntl.LOCK_SH)  # another process makes it: wait until it is done or gone
                    continue
                if os.fstat(file.fileno()).st_size != source.size:
                    self.counts["room"] += 1
                    return None
                try:
                    self._copy(source, file)
                    with self._locked():
                        temporary.rename(self.path(source))
                except BaseException:
                    with self._locked():
                        temporary.unlink(missing_ok=True)
                    raise
            sync_folder(self._folder)
            self.counts["made"] += 1
            return self.path(source)

    def close(self) -> None:
        """Let the store's copies be removed when others need the room."""
        self._in_use.close()

    def _is_right(self, source: Source) -> bool:
        """Whether there is a copy as it should be; another one is removed."""
        path = self.path(source)
        try:
            with path.open("rb") as file:
                right = os.fstat(file.fileno()).st_size == source.size
                right = right and hashlib.file_digest(file, "sha256").hexdigest() == source.sha256
                if right:
                    os.utime(path)
                    return True
        except FileNotFoundError:
            return False
        self.counts["replaced"] += 1
        path.unlink(missing_ok=True)
        return False

    def _begin(self, source: Source, temporary: Path, file: BinaryIO) -> bool:
        """Become the one who makes the copy and reserve its bytes; an empty file is left where there is no room."""
        with self._locked():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.stat(temporary).st_ino != os.fstat(file.fileno()).st_ino:
                    return False  # opened just before it was renamed or removed
            except (BlockingIOError, FileNotFoundError):
                return False
            file.truncate(0)  # whatever a killed process left
            if self._make_room(source.size, keep=temporary):
                file.truncate(source.size)
            else:
                temporary.unlink()
            return True

    def _make_room(self, num_bytes: int, *, keep: Path) -> bool:
        files: list[tuple[float, int, Path]] = []
        total = 0
        for folder in (self.directory / "shards").iterdir():
            mine = folder == self._folder
            idle = not mine and _is_idle(folder)
            for path in folder.iterdir():
                if path == keep or path.name == ".in-use":
                    continue
                if path.suffix == ".tmp" and _unlink_abandoned(path):
                    continue
                try:
                    stat = path.stat()
                except FileNotFoundError:
                    continue
                total += stat.st_size
                if idle:
                    files.append((stat.st_mtime, stat.st_size, path))
        for _, size, path in sorted(files):
            if total + num_bytes <= self.max_bytes:
                break
            path.unlink(missing_ok=True)
            self.counts["removed"] += 1
            total -= size
        return total + num_bytes <= self.max_bytes

    def _copy(self, source: Source, target: BinaryIO) -> None:
        digest, size = hashlib.sha256(), 0
        with source.open() as origin:
            while chunk := origin.read(_CHUNK):
                digest.update(chunk)
                os.pwrite(target.fileno(), chunk, size)
                size += len(chunk)
                if size > source.size:
                    break
        if size != source.size or digest.hexdigest() != source.sha256:
            raise ValueError(f"a shard does not have the checksum {source.sha256[:12]}... of its index; index it again")
        os.fsync(target.fileno())

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone among all processes in deciding what is copied and removed; never held while bytes are copied."""
        with open(self.directory / ".lock", "a+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _is_idle(folder: Path) -> bool:
    """Whether no process has the store of this folder open."""
    with open(folder / ".in-use", "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _unlink_abandoned(path: Path) -> bool:
    """Remove a temporary file whose writer is gone."""
    try:
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except BlockingIOError:
        return False
    except FileNotFoundError:
        pass
    return True


class Copies:
    """Makes copies in a thread, and says when one is ready. A child of fork starts a thread of its own.

    Attributes:
        failed: number of the source -> why there is no copy of it.
    """

    def __init__(self, cache: LocalCache, sources: list[Source], on_ready: Callable[[int, Path], None]) -> None:
        self.cache, self.failed = cache, dict[int, str]()
        self._sources, self._on_ready, self._closed = sources, on_ready, False
        self._begin()

    def _begin(self) -> None:
        self._wanted: queue.Queue[int | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._process = os.getpid()

    def want(self, number: int) -> None:
        """Make a copy of source ``number`` soon; numbers beyond the sources have none (the edit log)."""
        if number >= len(self._sources) or self._closed:
            return
        if os.getpid() != self._process:
            self._begin()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="local-cache", daemon=True)
                self._thread.start()
        self._wanted.put(number)

    def wait(self) -> None:
        """Until everything wanted so far is copied or has failed."""
        self._wanted.join()

    def stop(self) -> None:
        """Stop after the copies that are wanted already, without waiting for them."""
        self._closed = True
        if self._thread is not None and os.getpid() == self._process:
            self._wanted.put(None)

    def close(self) -> None:
        """Stop, and wait until that is so."""
        self.stop()
        if self._thread is not None and os.getpid() == self._process:
            self._thread.join()
        self._thread = None
        self.cache.close()

    def _work(self) -> None:
        while (number := self._wanted.get()) is not None:
            try:
                path = self.cache.get(self._sources[number])
                if path is not None:
                    self._on_ready(number, path)
                elif self.cache.counts["room"] == 1:
                    warnings.warn(
                        f"{self.cache.directory} is full ({self.cache.max_bytes} bytes): what does not fit is read "
                        "from its source",
                        stacklevel=1,
                    )
            except (OSError, ValueError) as error:
                self.failed[number] = str(error)
                if len(self.failed) == 1:
                    warnings.warn(f"no copy in {self.cache.directory}: {error}; read from its source", stacklevel=1)
            finally:
                self._wanted.task_done()
        self._wanted.task_done()
