"""Files that another machine wrote: waited for, read again, and named when they do not come."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from retriever import shared_disk
from retriever.shared_disk import NotSeenError, patiently, twice


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_disk, "PAUSE_S", 0.001)


class Late:
    """Fails so many times with an error, then gives 7."""

    def __init__(self, error: Exception, times: int) -> None:
        self.error, self.left, self.calls = error, times, 0

    def __call__(self) -> int:
        self.calls += 1
        self.left -= 1
        if self.left >= 0:
            raise self.error
        return 7


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE, errno.EIO])
def test_what_comes_late_is_read(number: int, tmp_path: Path):
    said: list[str] = []
    read = Late(OSError(number, "what the system says"), 3)
    assert patiently(read, folder=tmp_path, limit_s=30, say=said.append) == 7
    assert read.calls == 4 and len(said) == 1 and "what the system says" in said[0]


def test_what_is_there_is_read_once(tmp_path: Path):
    read = Late(OSError(), 0)
    assert patiently(read, folder=tmp_path, limit_s=0) == 7 and read.calls == 1


def test_what_does_not_come_is_named(tmp_path: Path):
    with pytest.raises(NotSeenError, match=rf"{tmp_path} could not be read \(stale\) for 0.01 s.*look at the disk"):
        patiently(Late(OSError(errno.ESTALE, "stale"), 10**9), folder=tmp_path, limit_s=0.01)


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "no"), ValueError("damaged")])
def test_what_waiting_does_not_mend_is_raised_at_once(error: Exception, tmp_path: Path):
    read = Late(error, 10**9)
    with pytest.raises(type(error)):
        patiently(read, folder=tmp_path, limit_s=30)
    assert read.calls == 1


def test_further_errors_may_mean_that_something_is_not_there_yet(tmp_path: Path):
    assert patiently(Late(KeyError("part"), 2), folder=tmp_path, limit_s=30, until=(KeyError,)) == 7
    with pytest.raises(KeyError, match="part"):
        patiently(Late(KeyError("part"), 10**9), folder=tmp_path, limit_s=0.01, until=(KeyError,))


def test_what_fails_once_is_written_anew_and_what_fails_twice_is_an_error():
    said: list[str] = []
    assert twice(Late(OSError(errno.EIO, "broken"), 1), what="index version 3", say=said.append) == 7
    assert said == ["INDEX VERSION 3 COULD NOT BE WRITTEN ([Errno 5] broken); once more"]
    write = Late(OSError(errno.EIO, "broken"), 10**9)
    with pytest.raises(OSError, match="broken"):
        twice(write, what="it")
    assert write.calls == 2
