"""Files of lines: whole lines or none, and none is believed to be on the disk that may not be."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from rag_mm.line_file import LineFile


def test_lines_follow_what_is_kept(tmp_path: Path):
    path = tmp_path / "lines"
    path.write_text("old\n")
    file = LineFile(path, "kept\n")
    file.append("a")
    assert path.read_text() == "kept\na\n"
    file.sync()
    file.append("ü")
    file.close()
    assert path.read_text() == "kept\na\nü\n" and list(tmp_path.iterdir()) == [path]


def test_without_a_line_there_is_no_file(tmp_path: Path):
    path = tmp_path / "lines"
    file = LineFile(path, None)
    file.flush()
    file.sync()
    assert not path.exists()
    file.append("a")
    file.close()
    assert path.read_text() == "a\n"


def test_what_could_not_be_made_durable_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As a system does that drops pages after a failed fsync: the second one would succeed, with a hole in the file."""
    path, fsync, broken = tmp_path / "lines", os.fsync, False
    file = LineFile(path, "kept\n")

    def lose(descriptor: int) -> None:
        if broken:
            path.write_bytes(b"kept\n" + b"\0" * (path.stat().st_size - 5))
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", lose)
    file.append("a")
    file.append("b")
    broken = True
    with pytest.raises(OSError, match="Input/output"):
        file.sync()
    assert file.problem is not None
    broken = False
    file.append("c")
    file.close()
    assert path.read_text() == "kept\na\nb\nc\n" and file.problem is None


def test_a_file_that_cannot_be_replaced_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "lines"
    path.write_text("old\n")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        LineFile(path, "kept\n")
    assert path.read_text() == "old\n" and list(tmp_path.iterdir()) == [path]


def test_lines_are_appended_while_the_disk_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, may_end, fsync = LineFile(tmp_path / "lines", ""), threading.Event(), os.fsync
    file.append("before")
    monkeypatch.setattr(os, "fsync", lambda descriptor: may_end.wait() and fsync(descriptor))
    syncing = threading.Thread(target=file.sync)
    syncing.start()
    for number in range(50):
        file.append(str(number))  # would hang, if it waited
    may_end.set()
    syncing.join()
    file.close()
    assert file.path.read_text().split() == ["before", *map(str, range(50))]
