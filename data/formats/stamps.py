"""Sizes and times of users' files, kept by a conversion that may be interrupted: it goes on only if they are the same.

Files that are read by lines are surveyed with a checksum (`data.formats.lines`). Of tars, pictures and whatever
`datasets` loads there may be a hundred million, so their contents are not read twice; a stamp is one ``stat``. It is
compared for all tars whenever a conversion is taken up, and for the pictures of a piece when the piece is found to be
done. A file whose contents change while its size and time stay is not noticed.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data.formats.lines import write_atomically

Stamp = tuple[int, int]  # bytes, and time of modification (ns)
ABSENT = (-1, 0)

_noted: dict[str, Stamp] | None = None  # of the piece that this process works on


def stamp(path: Path) -> Stamp:
    """Of a file; `ABSENT` if there is none."""
    try:
        stat = path.stat()
    except (OSError, ValueError):
        return ABSENT
    return stat.st_size, stat.st_mtime_ns


def stamps(paths: Iterable[Path]) -> dict[str, Any]:
    """Of several files by name, as JSON gives them back."""
    return {str(path): list(stamp(path)) for path in paths}


def check_same(kept: Path, now: Mapping[str, Any], building: Path) -> None:
    """Keep the stamps of a conversion's files, or compare with those that it began with.

    Raises:
        ValueError: names the first that differs.
    """
    if not kept.exists():
        write_atomically(kept, json.dumps(now, ensure_ascii=False))
        return
    then: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    for name in {**then, **now}:
        if then.get(name) != now.get(name):
            what = "is new" if name not in then else "is gone" if name not in now else "has changed"
            raise ValueError(_message(name, what, building))


@contextmanager
def noting() -> Iterator[dict[str, Stamp]]:
    """Collects what `note` is told within."""
    global _noted
    before, _noted = _noted, {}
    try:
        yield _noted
    finally:
        _noted = before


def note(path: Path) -> None:
    """Of a file that is about to be read for a piece."""
    if _noted is not None:
        _noted[str(path)] = stamp(path)


def write(kept: Path, noted: Mapping[str, Stamp]) -> None:
    """Keep what was noted of a piece."""
    temporary = kept.with_name(kept.name + ".tmp")
    with gzip.open(temporary, "wt", encoding="utf-8", compresslevel=1) as file:
        file.writelines(json.dumps([name, *found]) + "\n" for name, found in noted.items())
    os.replace(temporary, kept)


def check_noted(kept: Path, building: Path) -> None:
    """Compare what was noted of a piece with what is there now.

    Raises:
        ValueError: names the first that differs.
    """
    if not kept.exists():
        return
    with gzip.open(kept, "rt", encoding="utf-8") as file:
        for line in file:
            name, size, mtime_ns = json.loads(line)
            now = stamp(Path(name))
            if now != (size, mtime_ns):
                what = "is gone" if now == ABSENT else "is new" if size < 0 else "has changed"
                raise ValueError(_message(name, what, building))


def _message(name: str, what: str, building: Path) -> str:
    return f"{name} {what} since this conversion began; put it back as it was, or remove {building} to begin anew"
