"""InfoSeek's scores (2302.11713): exact match, numbers by range, harmonic mean of two kinds of unseen questions.

Entities and times: exact match after SQuAD's normalisation, the best of ``answer_eval``. Numbers: the gold answer is a
range (the published files give it, ten per cent around the value). A predicted number is right inside it, ends
included; a predicted range is right inside it, or where intersection over union is at least one half.

Kept from the published code on purpose: a number is found anywhere in the prediction; the first two make a range if
they ascend, else the first one counts; a hyphen after a digit is a range, not a minus; periods at a number's ends are
stripped, so that ".5" is 5; without any number the prediction is the range from 0 to 0, which is right where the gold
range holds 0. Not kept: the split scores are not rounded before their harmonic mean, and a question without prediction
counts as wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rag_mm.evaluate.scoring.squad import exact_match, maximum_over

Range = tuple[float, float]

_NUMBER = re.compile(r"[-+]?[.]?[\d]+(?:,\d\d\d)*[\.]?\d*(?:[eE][-+]?\d+)?")
_EPSILON = 1e-12


def parse_number(text: str) -> float | Range:
    """The number or ascending range that a prediction states; (0, 0) if it states none."""
    spaced = "".join(" - " if mark == "-" and i >= 1 and text[i - 1].isdigit() else mark for i, mark in enumerate(text))
    numbers = [n for found in _NUMBER.findall(spaced) if (n := _to_float(found)) is not None][:2]
    if not numbers:
        return 0.0, 0.0
    if len(numbers) == 2 and numbers[0] <= numbers[1]:
        return numbers[0], numbers[1]
    return numbers[0]


def number_is_right(answer: float | Range, gold: Range) -> bool:
    """Whether a number lies in the gold range, or a range lies in it or overlaps it by half."""
    low, high = gold
    if isinstance(answer, float):
        return low <= answer <= high
    if low <= answer[0] <= high and low <= answer[1] <= high:
        return True
    return intersection_over_union(answer, gold) >= 0.5 - _EPSILON


def intersection_over_union(a: Range, b: Range) -> float:
    """Of two intervals on the line."""
    overlap = max(0.0, min(max(a), max(b)) - max(min(a), min(b)))
    union = (max(a) - min(a)) + (max(b) - min(b)) + 2 * _EPSILON - overlap
    return overlap / union


def infoseek_score(answer: str, golds: Iterable[str] | Range, *, numerical: bool) -> float:
    """1 if an answer is right, else 0.

    Args:
        golds: accepted answers, or the gold range of a numerical question.
    """
    if numerical:
        low, high = (float(bound) for bound in golds)
        return float(number_is_right(parse_number(answer), (low, high)))
    return maximum_over(exact_match, answer, (str(gold) for gold in golds))


def harmonic_mean(a: float, b: float) -> float:
    """Of two fractions; 0 if one of them is (up to 1e-12, as published)."""
    return 2 / (1 / (a or _EPSILON) + 1 / (b or _EPSILON))


def _to_float(found: str) -> float | None:
    """None for the odd find, such as "-.5.3", of which no number is left (the published code stops there)."""
    digits = found.replace(",", "").strip(".")
    try:
        return float(digits.split(".")[0] if digits.count(".") > 1 else digits)
    except ValueError:
        return None
