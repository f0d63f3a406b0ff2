"""The answers that are ranked where decoding writes none (``evaluate.decoding score``)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.dataset import Dataset


class Candidates:
    """Answers to choose from, by the field of the question, in the order in which ties are broken.

    Args:
        by_field: answers of each field.
        everywhere: answers for questions of any other field.
        source: what they come from, for messages.
    """

    def __init__(self, by_field: Mapping[str, Sequence[str]], everywhere: Sequence[str] = (), *, source: str) -> None:
        self._by_field = {field: _distinct(answers) for field, answers in by_field.items()}
        self._everywhere, self._source = _distinct(everywhere), source

    def of(self, field: str) -> tuple[str, ...]:
        """The answers for a question of a field.

        Raises:
            ValueError: if there are none.
        """
        found = self._by_field.get(field, self._everywhere)
        if not found:
            raise ValueError(
                f"there is no candidate for questions of field {field!r} in {self._source}; "
                "name a file that has some with --evaluate.candidates, or use another --evaluate.decoding"
            )
        return found


def training_candidates(dataset: Dataset) -> Candidates:
    """Of each field, the answers that its training questions teach (their first accepted ones), sorted."""
    answers: dict[str, set[str]] = {}
    for sample in dataset.questions("train"):
        if sample.weight:
            answers.setdefault(sample.field, set()).add(sample.answers[0])
    by_field = {field: sorted(found) for field, found in answers.items()}
    return Candidates(by_field, source="the training questions")


def read_candidates(path: str | Path) -> Candidates:
    """Candidates of a file: JSON ``{field: [answers]}`` or ``[answers]`` (``.json``), else one answer a line.

    Raises:
        FileNotFoundError, ValueError: if there is no such file, or something else in it.
    """
    path = Path(path)
    where = f"evaluate.candidates {path}"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(f"evaluate.candidates is {path}, which does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} cannot be read: {error}") from None
    if path.suffix != ".json":
        return Candidates({}, [line.strip() for line in text.splitlines() if line.strip()], source=where)
    try:
        contents = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}, line {error.lineno} is not JSON: {error.msg}") from None
    if isinstance(contents, dict):
        by_field = {field: _texts(value, f"{where}: {field}") for field, value in contents.items()}
        return Candidates(by_field, source=where)
    return Candidates({}, _texts(contents, where), source=where)


def _texts(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item.strip() for item in value):
        raise ValueError(f"{where} must be a list of texts, none of them empty")
    return value


def _distinct(answers: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(answers))
