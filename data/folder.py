"""A folder of files that are read by range, on a local disk or on any file system that fsspec knows.

Local paths are read with the calls of the operating system; whatever has a scheme (``s3://bucket/documents``,
``memory://x``) goes through fsspec. Appending under a lock exists on local paths only. File systems that append
without one (memory, HDFS, SFTP) are written to all the same, but there one process at a time is the user's duty;
object stores cannot append at all, which is refused rather than played by writing the whole object anew.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "http", "https", "hf")


@dataclass(frozen=True)
class FileEntry:
    """A file of the folder: its size in bytes, and its time (ns; 0 where the file system does not keep one)."""

    name: str
    size: int
    mtime_ns: int


class Folder:
    """One folder.

    Attributes:
        url: as it was given.
        local: its path, or None if fsspec reads it.
        filesystem: the ``fsspec.AbstractFileSystem`` that reads it, or None if it is local.
    """

    def __init__(self, url: str | Path) -> None:
        """Nothing is read yet; ValueError for a scheme that fsspec does not know."""
        self.url = str(url)
        self.local: Path | None = None
        self.filesystem: Any = None
        if "://" not in self.url and "::" not in self.url:
            self.local = Path(url)
            return
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        try:
            self.filesystem, self._path = fsspec.core.url_to_fs(self.url)
        except (ValueError, ImportError) as error:
            raise ValueError(f"{self.url} cannot be read: {error}") from error
        if isinstance(self.filesystem, LocalFileSystem):
            self.local, self.filesystem = Path(self._path), None

    def __str__(self) -> str:
        return self.url

    def path(self, name: str) -> str:
        """Where a file of the folder lies, as its file system spells it."""
        return str(self.local / name) if self.local is not None else f"{self._path.rstrip('/')}/{name}"

    def tars(self) -> list[FileEntry]:
        """The shards, sorted by name."""
        if self.local is not None:
            found = ((path.name, path.stat()) for path in self.local.glob("*.tar"))
            return sorted(
                (FileEntry(name, stat.st_size, stat.st_mtime_ns) for name, stat in found), key=lambda f: f.name
            )
        self.filesystem.invalidate_cache()
        try:
            entries = self.filesystem.ls(self._path, detail=True)
        except FileNotFoundError:
            return []
        names = ((entry["name"].rstrip("/").rpartition("/")[2], entry) for entry in entries)
        return sorted(
            (FileEntry(name, entry["size"], 0) for name, entry in names if name.endswith(".tar")), key=lambda f: f.name
        )

    def size(self, name: str) -> int | None:
        """Bytes of a file, or None if there is none."""
        try:
            if self.local is not None:
                return os.stat(self.path(name)).st_size
            self.filesystem.invalidate_cache()
            return int(self.filesystem.info(self.path(name))["size"])
        except FileNotFoundError:
            return None

    def read(self, name: str, *, start: int = 0) -> bytes:
        """A file from byte ``start`` on; empty if there is no file or nothing more in it."""
        size = self.size(name)
        if size is None or size <= start:
            return b""
        if self.local is None:
            return bytes(self.filesystem.cat_file(self.path(name), start=start, end=size))
        with open(self.path(name), "rb") as file:
            file.seek(start)
            return file.read()

    def open(self, name: str) -> BinaryIO:
        """A file, to be read from front to back."""
        return open(self.path(name), "rb") if self.local is not None else self.filesystem.open(self.path(name), "rb")

    @contextmanager
    def appending(self, name: str) -> Iterator[Appender]:
        """A file to append to, made if there is none; on local paths nobody else can at the same time.

        Raises:
            ValueError: this file system cannot append, or not under a lock; says what to do.
        """
        path = self.path(name)
        if self.local is None:
            protocol = self.filesystem.protocol
            names = {protocol} if isinstance(protocol, str) else set(protocol)
            refusal = f"{self.url} cannot be edited: {min(names)} has no appending to a file; edit a copy on a disk"
            if names & set(OBJECT_STORES):
                raise ValueError(refusal)
            try:
                file = self.filesystem.open(path, "ab")
            except (NotImplementedError, ValueError) as error:
                raise ValueError(refusal) from error
            with file:
                yield Appender(file, self.size(name) or 0, None)
            return
        new = not os.path.exists(path)
        with open(path, "ab", buffering=0) as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                raise ValueError(
                    f"{path} cannot be edited: its file system has no locks (flock: {error.strerror}), so two writers "
                    "could tear each other's lines; mount it with locks (Lustre: -o flock) or edit a copy elsewhere"
                ) from error
            if new:
                sync_folder(os.path.dirname(path) or ".")
            yield Appender(log, os.fstat(log.fileno()).st_size, log.fileno())


class Appender:
    """A file that its only writer appends to.

    Attributes:
        size: its bytes.
    """

    def __init__(self, file: Any, size: int, descriptor: int | None) -> None:
        self._file, self.size, self._descriptor = file, size, descriptor

    def cut(self, size: int) -> None:
        """Remove what stands behind byte ``size``."""
        if size == self.size:
            return
        if self._descriptor is None:
            raise ValueError(
                f"the file ends in {self.size - size} bytes of an interrupted write, which this file system cannot "
                "cut off; copy the file without them"
            )
        os.ftruncate(self._descriptor, size)
        self.size = size

    def append(self, data: bytes) -> None:
        """Write ``data`` for good: on local paths it is on the disk when this returns, or nothing is.

        Elsewhere it is stored when `Folder.appending` ends.
        """
        if self._descriptor is None:
            self._file.write(data)
            self.size += len(data)
            return
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            os.fsync(self._descriptor)
        except OSError:  # a full disk: half a line must not stay
            os.ftruncate(self._descriptor, self.size)
            raise
        self.size += len(data)


def sync_folder(path: str | Path) -> None:
    """Make the names in a folder last through a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
