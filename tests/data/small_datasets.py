"""Data sets by hand, of a few questions and documents."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data import shards

QUESTION: dict[str, Any] = {
    "question": "q?", "answers": ["a"], "kind": "name", "field": "f", "country": "c", "gold": ["c"],
}  # fmt: skip


def write_dataset(
    folder: Path, questions: Sequence[tuple[str, Mapping[str, bytes]]], *, documents: Sequence[str] = ("c",)
) -> Path:
    """A folder that `data.dataset.Dataset` opens: all questions are train's, one pair, one field of each document."""
    shards.write_shards(folder / "questions", questions)
    pair = json.dumps({"text": "", "gold": ["c"]}).encode()
    shards.write_shards(folder / "pairs", [("p", {"json": pair, "png": b"x"})])
    body = json.dumps({"title": "C", "fields": {"f": "a"}}).encode()
    shards.write_shards(folder / "documents", [(name, {"json": body}) for name in documents])
    (folder / "questions" / "entities.json").write_text(json.dumps([None] * len(questions)))
    (folder / "pairs" / "entities.json").write_text("[null]")
    (folder / "splits.json").write_text(json.dumps({"folds": [{"dev": [], "test": []}]}))
    (folder / "dataset.json").write_text(json.dumps({"fields": ["f"], "fingerprint": folder.name}))
    return folder


def question(**changed: Any) -> dict[str, bytes]:
    """The members of a question."""
    return {"json": json.dumps({**QUESTION, **changed}).encode()}
