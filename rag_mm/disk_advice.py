"""What to do about a file that could not be written or read: one clause, by what the system said."""

from __future__ import annotations

import errno
import os
from pathlib import Path

STILL_WRITING = "still writing the checkpoint"  # what `rag_mm.saver` says when time is over
_BY_NUMBER = (
    ((errno.ENOSPC, errno.EDQUOT), "make room there"),
    ((errno.EACCES, errno.EPERM), "give this user the right to write there (owner and mode, ls -ld)"),
    ((errno.EROFS,), "mount it for writing; a disk that became read-only by itself has errors (dmesg)"),
    ((errno.EIO, errno.ESTALE, errno.ETIMEDOUT), "look at that disk or its mount (dmesg)"),
)


def advice(problem: str, place: str | Path) -> str:
    """What the user can do about ``problem``, the text of an OSError (also one that another rank told)."""
    if STILL_WRITING in problem:
        return f"the disk is slow or does not answer: look at {place}, or raise checkpoint.limit_s if there is time"
    for numbers, what in _BY_NUMBER:
        if any(os.strerror(number) in problem for number in numbers):
            return f"{what} ({place})"
    return f"look at {place}, and make room there if it is full"
