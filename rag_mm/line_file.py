"""A file of lines that grows while a run trains, and that loses none of them to a disk.

A line that cannot be written (the disk is full, a permission was taken away) does not end training: it waits in
memory and goes out with the next one, whole lines or none. ``fsync`` may run on another thread, so that a slow
disk does not stop steps. After an ``fsync`` that failed, the pages it could not write count as written for the
system and a second ``fsync`` would succeed with nothing on the disk; so lines are kept until one has succeeded,
and written again after one that has not. That costs the memory of the lines between two checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from retriever.durable_files import replace_text


class LineFile:
    """Appends lines to ``path``, which is first replaced by ``kept`` (None: it is made with the first line).

    Attributes:
        problem: why lines are waiting, or None.

    Raises:
        OSError: if the file cannot be replaced; it is then as it was.
    """

    def __init__(self, path: Path, kept: str | None) -> None:
        self.path = path
        self.problem: str | None = None
        self._descriptor: int | None = None
        self._durable = 0  # bytes
        self._lines = b""  # those after the durable ones
        self._written = 0  # bytes of them
        self._lock = threading.Lock()
        if kept is not None:
            self._descriptor = self._open(kept)

    def _open(self, kept: str) -> int:
        replace_text(self.path, kept)
        self._durable = len(kept.encode())
        return os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)

    def append(self, line: str) -> None:
        """Write a line, or keep it for the next time."""
        with self._lock:
            self._lines += line.encode() + b"\n"
        with contextlib.suppress(OSError):
            self.flush()

    def flush(self) -> None:
        """Write all lines that wait; what a failed attempt left behind is cut off first.

        Raises:
            OSError: if that is not possible.
        """
        with self._lock:
            try:
                if self._descriptor is None:
                    if not self._lines:
                        return
                    self._descriptor = self._open("")
                end = self._durable + self._written
                os.ftruncate(self._descriptor, end)
                os.lseek(self._descriptor, end, os.SEEK_SET)
                rest = memoryview(self._lines)[self._written :]
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError as error:
                self.problem = str(error)
                raise
            self._written, self.problem = len(self._lines), None

    def sync(self) -> None:
        """Make durable what has been written; another thread may append meanwhile.

        Raises:
            OSError: if that is not possible.
        """
        with self._lock:
            written, descriptor = self._written, self._descriptor
        if descriptor is None:
            return
        try:
            os.fsync(descriptor)
        except OSError as error:
            with self._lock:
                self._written, self.problem = 0, str(error)
            raise
        with self._lock:
            self._durable += written
            self._lines = self._lines[written:]
            self._written -= written

    def close(self) -> None:
        """Make all lines durable and close the file, even if that fails (an OSError)."""
        try:
            self.flush()
            self.sync()
        finally:
            if self._descriptor is not None:
                os.close(self._descriptor)
