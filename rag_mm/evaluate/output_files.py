"""Files that a user names for results: whether they can be written is asked before hours of work; written whole."""

from __future__ import annotations

import os
from pathlib import Path


def check_output(value: str, *, option: str) -> None:
    """Whether a file can be put there, as far as one can tell without putting it; empty and "-" are no files.

    Raises:
        ValueError: if it is a folder, or its folder cannot be made or written to.
    """
    if value in ("", "-"):
        return
    path = Path(value)
    if path.is_dir():
        raise ValueError(f"{option} is {value!r}, which is a folder; name a file")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{option} is {value!r}, but nothing can be written into {folder}; name a file elsewhere")


def write_output(path: Path, text: str) -> None:
    """Write by rename, folders included.

    Raises:
        ValueError: if that fails; names file and reason.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error}") from None
