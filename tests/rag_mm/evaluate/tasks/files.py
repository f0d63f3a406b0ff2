"""Writing the files of a test, and scoring them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rag_mm.evaluate.metric import Scores
from rag_mm.evaluate.tasks.task import Missing, Task


def write(path: Path, content: Any) -> Path:
    """A list of objects as jsonl if the name says so, other objects as JSON, text as it is."""
    if isinstance(content, str):
        text = content
    elif path.suffix == ".jsonl":
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in content)
    else:
        text = json.dumps(content, ensure_ascii=False)
    path.write_text(text, encoding="utf-8")
    return path


def score(task: Task[Any, Any], predictions: Path, *references: Path, missing: Missing = "zero") -> Scores:
    return task.score_files(predictions, references, missing=missing)


def lines(*rows: dict[str, Any]) -> Sequence[dict[str, Any]]:
    return rows
