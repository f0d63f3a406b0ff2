"""Files that must be whole after a crash: their checksums, and how they reach the disk."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import shutil
import time
from pathlib import Path

LEFT_S = 3600.0  # nobody writes a small file for so long


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Make a file's contents, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that after a crash, or on a full disk, it is whole: the new one or the old one.

    What a process left that was killed in here goes with a later call, when it is ``LEFT_S`` old.

    Raises:
        OSError: if it could not be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)
    _remove_left(path)


def _remove_left(path: Path) -> None:
    with contextlib.suppress(OSError):
        for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
            if time.time() - left.stat().st_mtime > LEFT_S:
                left.unlink(missing_ok=True)


def seal(path: Path, digest: str) -> None:
    """Write beside a file the checksum of what was meant to be in it, durably.

    Raises:
        OSError: if it could not be written.
    """
    replace_text(_seal(path), digest)


def is_sealed(path: Path, digest: str | None = None) -> bool:
    """Whether a file is there and its contents are those that it was sealed with.

    Args:
        digest: of its contents, where they were read already.
    """
    try:
        return (sha256(path) if digest is None else digest).encode() == _seal(path).read_bytes()
    except FileNotFoundError:
        return False


def unseal(path: Path) -> ValueError:
    """Take a damaged file's seal away, so that the job that made it makes it anew; what to raise."""
    _seal(path).unlink(missing_ok=True)
    return ValueError(f"{path} has changed since it was written; run the same command again, which makes it anew")


def _seal(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def put_folder(temporary: Path, final: Path) -> None:
    """Give a whole folder its name, in place of one that has it already.

    Raises:
        OSError: if that is not possible; the old one is then still there, perhaps beside its name.
    """
    if final.exists():
        remove_folder(final)
    temporary.rename(final)
    sync(final.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder that may be read or killed meanwhile: first its name, so that nobody takes half of it for whole.

    Raises:
        OSError: if something of it could not be removed; its name is then gone all the same.
    """
    aside = folder.with_name(f".{folder.name}.gone.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside)
