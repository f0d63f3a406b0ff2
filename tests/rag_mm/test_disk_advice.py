"""Advice by what the system said."""

from __future__ import annotations

import errno
import os

import pytest

from rag_mm.disk_advice import STILL_WRITING, advice


@pytest.mark.parametrize(
    "number, words",
    [
        (errno.ENOSPC, "make room there"),
        (errno.EACCES, "right to write"),
        (errno.EROFS, "mount it for writing"),
        (errno.EIO, "dmesg"),
        (errno.ESTALE, "mount"),
    ],
)
def test_each_error_has_its_advice(number: int, words: str):
    said = advice(f"rank 1: {OSError(number, os.strerror(number))}", "/runs/a")
    assert words in said and "/runs/a" in said


def test_time_that_is_over_and_what_nobody_knows():
    assert "checkpoint.limit_s" in advice(f"rank 0 was {STILL_WRITING} after 3 s", "/runs/a")
    assert "look at /runs/a" in advice("something else", "/runs/a")
