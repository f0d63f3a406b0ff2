"""Consistent renaming of facts: what stops the reader from learning the memory by heart.

In every training step most of each field's values are mapped to others, the same map for all documents and all
answers of that step: if "Kathmandu" becomes "Lisbon", every document that said so and every answer that
expected so says Lisbon. Which document belongs to which question is never looked at, so the augmentation
leaks no label. Half of the renamed values become another value of the field, the rest a splice of two of them,
a word nobody has seen; copying is then what works.

A map is a pure function of (seed, step, field, value). Values outside the training documents stay.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

from pipeline.keyed import seed_of

DIGITS = "0123456789"


class Renaming:
    """The maps of one training step.

    Args:
        values: values of each field over the training documents.
        fraction: share of values that are renamed at all (0: identity).
    """

    def __init__(self, values: Mapping[str, Sequence[str]], *, seed: int, step: int, fraction: float = 1.0) -> None:
        self._maps = {
            field: _map(sorted(set(names)), random.Random(seed_of("renaming", seed, step, field)), fraction)
            for field, names in values.items()
        }

    def value(self, field: str, value: str) -> str:
        """What ``value`` of ``field`` is called in this step."""
        return self._maps.get(field, {}).get(value, value)

    def fields(self, fields: Mapping[str, str]) -> dict[str, str]:
        """All fields of a document as they are called in this step."""
        return {field: self.value(field, value) for field, value in fields.items()}


def _map(names: Sequence[str], draw: random.Random, fraction: float) -> dict[str, str]:
    others = list(names)
    draw.shuffle(others)
    result = {}
    for name, other in zip(names, others, strict=True):
        if draw.random() >= fraction:
            continue
        result[name] = other if draw.random() < 0.5 else _splice(other, draw.choice(names), draw)
    return result


def _splice(first: str, second: str, draw: random.Random) -> str:
    """The head of one name and the tail of another, digits drawn anew; never empty."""
    cut_first = draw.randint(1, max(1, len(first) - 1))
    cut_second = draw.randint(0, max(0, len(second) - 1))
    spliced = (first[:cut_first] + second[cut_second:]).strip() or first
    return "".join(draw.choice(DIGITS) if c in DIGITS else c for c in spliced)


def field_values(documents: Iterable[Mapping[str, str]]) -> dict[str, list[str]]:
    """Distinct values of each field over ``documents`` (their ``fields``), sorted."""
    values: dict[str, set[str]] = {}
    for fields in documents:
        for field, value in fields.items():
            values.setdefault(field, set()).add(value)
    return {field: sorted(names) for field, names in values.items()}
