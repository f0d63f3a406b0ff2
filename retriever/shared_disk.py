"""Reading what another machine has written to a disk that several share.

On NFS and its like a file can be there and not be seen: a client keeps what it knows of a folder for some time (60 s
by default, ``acdirmax`` in nfs(5)), the handle of a folder that was replaced is stale (``ESTALE``), and an overloaded
server answers with ``EIO`` once. Whoever knows from elsewhere that a file must be there, as ranks know that the first
one found a checkpoint, waits for it here. Reading again is harmless, as what is read has a checksum. *Writing* is
not repeated in the same way: after a failed ``fsync`` only writing everything anew says anything.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
PASSING = (errno.ENOENT, errno.ESTALE, errno.EIO)
PAUSE_S = 0.2


class NotSeenError(OSError):
    """A file that must be there has not been seen in time; the message says where and what to do."""


def patiently(
    read: Callable[[], T],
    *,
    folder: Path,
    limit_s: float,
    say: Callable[[str], None] = lambda line: None,
    until: tuple[type[Exception], ...] = (),
) -> T:
    """What ``read`` gives, tried again while its files are not there or cannot be read.

    Args:
        folder: where they are; its names are listed before each attempt, which makes a client look anew.
        limit_s: longest wait.
        say: told once that this waits.
        until: further errors that mean that something is not there yet; the last one is raised as it is.

    Raises:
        NotSeenError: if time is over.
    """
    caught: tuple[type[Exception], ...] = (OSError, *until)
    end, said = time.monotonic() + limit_s, False
    while True:
        try:
            return read()
        except caught as error:
            if isinstance(error, OSError) and error.errno not in PASSING and not isinstance(error, FileNotFoundError):
                raise
            if time.monotonic() >= end:
                if not isinstance(error, OSError):
                    raise
                raise NotSeenError(
                    f"{folder} could not be read ({error.strerror or error}) for {limit_s:g} s, though it is known to "
                    "be there: look at the disk or the mount of this machine, then run the same command again",
                ) from error
            if not said:
                said = True
                say(f"waiting up to {limit_s:g} s for {folder}: {error}")
        time.sleep(min(PAUSE_S, max(0.0, end - time.monotonic())))
        for place in (folder.parent, folder):
            with contextlib.suppress(OSError):
                os.listdir(place)


def twice(write: Callable[[], T], *, what: str, say: Callable[[str], None] = lambda line: None) -> T:
    """What ``write`` gives, called once more if the disk fails the first time; it must begin anew each time.

    Args:
        what: for the message of the first failure.
        say: told of it.
    """
    try:
        return write()
    except OSError as error:
        say(f"{what.upper()} COULD NOT BE WRITTEN ({error}); once more")
        return write()
