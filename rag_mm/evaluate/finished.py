"""Predictions that are done: appended as they come, so that a killed evaluation goes on where it was.

A folder beside the result holds ``made_with.json`` (what decides the predictions: weights, memory, decoding) and a
file a row and writer, one prediction a line. Lines are appended batch by batch and made durable; what a kill cut off
is the end of the last line, and is cut away. Everything else in the folder is believed only if it was made with the
same: else it is thrown away, and that is said. When the result is written, the folder goes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rag_mm.evaluate.prediction import Prediction

MADE_WITH = "made_with.json"


class Finished:
    """The folder of an evaluation that is under way.

    Args:
        directory: where it lies; `open_finished` makes it.
        writer: names the files that this process appends to; no two processes have the same.
    """

    def __init__(self, directory: Path, *, writer: str) -> None:
        self.directory, self._writer = directory, writer

    def read(self, row: str) -> dict[str, Prediction]:
        """What is done of a row, by whichever writer, by question id.

        Raises:
            ValueError: if a line is damaged; names it.
        """
        found = {}
        for path in sorted(self.directory.glob(f"{row}@*.jsonl")):
            lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # splitlines() would break texts up as well
            for number, line in enumerate(lines, start=1):
                try:
                    prediction = _from_json(line)
                except (ValueError, TypeError, KeyError):
                    raise ValueError(
                        f"{path}, line {number} is no prediction; remove the folder {self.directory} to begin anew"
                    ) from None
                found[prediction.id] = prediction
        return found

    def append(self, row: str, predictions: Sequence[Prediction]) -> None:
        """Add predictions, durably."""
        lines = "".join(json.dumps(asdict(p), ensure_ascii=False) + "\n" for p in predictions)
        with (self.directory / f"{row}@{self._writer}.jsonl").open("ab") as file:
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """The result is written: all of this is in it."""
        shutil.rmtree(self.directory)


def open_finished(directory: Path, made_with: Mapping[str, Any]) -> str:
    """Make the folder, or go on with the one that is there; gives what has to be said of it. One process calls this."""
    text = json.dumps(made_with, indent=2, sort_keys=True) + "\n"
    said = ""
    if directory.exists():
        old = (directory / MADE_WITH).read_text(encoding="utf-8")
        if old == text:
            torn = sum(map(_repair, directory.glob("*.jsonl")))
            return f"predictions that a kill cut off, which are made again: {torn}" if torn else ""
        said = f"{directory} is of another evaluation and is begun anew: {_difference(old, made_with)}"
        shutil.rmtree(directory)
    temporary = directory.with_name(f"{directory.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    (temporary / MADE_WITH).write_text(text, encoding="utf-8")
    temporary.rename(directory)
    return said


def _repair(path: Path) -> bool:
    """Cut away a last line without an end; whether there was one."""
    with path.open("rb+") as file:
        whole = file.read().rfind(b"\n") + 1
        torn = whole < file.tell()
        file.truncate(whole)
    return torn


def _difference(old: str, made_with: Mapping[str, Any]) -> str:
    before = json.loads(old)
    for name in sorted({*before, *made_with}):
        if before.get(name) != made_with.get(name):
            return f"{name} was {before.get(name)}, now {made_with.get(name)}"
    raise AssertionError("they differ")


def _from_json(line: str) -> Prediction:
    values: dict[str, Any] = json.loads(line)
    tuples: dict[str, Any] = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Prediction(**{**values, **tuples})
