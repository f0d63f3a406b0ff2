"""VQA accuracy (1505.00468): an answer is right as far as annotators gave it, min(1, matches / 3).

The mean is taken over annotators left out one at a time: with ten of them, an answer that m gave scores
m/10 * min(1, (m - 1)/3) + (10 - m)/10 * min(1, m/3). What counts as a match depends on how strings are normalised, and
two versions of the official evaluation are in use, which differ by tenths of a point:

``official`` (upstream until March 2021; the figures of papers and leaderboards of those years, and the copies in BLIP
and LAVIS): the prediction is always normalised; the references lose punctuation, and only where annotators disagree.
Their articles, capitals and number words stay, so that "the dog" or "two" among the references match no prediction.

``both_on_disagreement`` (upstream since March 2021): where annotators disagree both are normalised in full, else
neither is, so that "Yes." does not match ten times "yes".

Kept from the published code on purpose: a mark that touches a space anywhere in the text is removed everywhere, else
it becomes a space; a comma between digits makes all marks disappear; of periods, those that no digit follows go, the
first 32 of a text (a flag stands where a count belongs); digits are ASCII.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from rag_mm.evaluate.scoring.vqa_tables import ARTICLES, CONTRACTIONS, NUMBERS, PUNCTUATION

Variant = Literal["official", "both_on_disagreement"]

_PERIOD = re.compile(r"\.(?![0-9])")
_MAX_PERIODS = 32
_COMMA_IN_NUMBER = re.compile(r"[0-9],[0-9]")


@lru_cache(maxsize=1 << 17)  # ten annotators say much the same, and most questions have been answered before
def strip_punctuation(text: str) -> str:
    """Marks removed or turned into spaces, periods removed unless a digit follows."""
    join = _COMMA_IN_NUMBER.search(text) is not None
    stripped = text
    for mark in PUNCTUATION:
        touches_space = f"{mark} " in text or f" {mark}" in text
        stripped = stripped.replace(mark, "" if join or touches_space else " ")
    return _PERIOD.sub("", stripped, count=_MAX_PERIODS)


def map_words(text: str) -> str:
    """Lower case, number words up to ten as digits, no articles, apostrophes put back into contractions."""
    words = [NUMBERS.get(word, word) for word in text.lower().split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


@lru_cache(maxsize=1 << 17)
def normalise(text: str) -> str:
    """Full normalisation, as of a prediction."""
    return map_words(strip_punctuation(_one_line(text)))


def vqa_accuracy(answer: str, references: Sequence[str], *, variant: Variant = "official") -> float:
    """Accuracy of one answer.

    Args:
        references: one answer an annotator, ten in VQA and OK-VQA; they count by position, equal ones too.

    Raises:
        ValueError: if there is no reference.
    """
    if not references:
        raise ValueError("there is no reference answer")
    if variant == "official":
        disagree = len(set(references)) > 1
        mine = normalise(answer)
        others = [strip_punctuation(r) for r in references] if disagree else list(references)
    else:
        others = [_one_line(r) for r in references]
        mine = _one_line(answer)
        if len(set(others)) > 1:
            mine, others = normalise(mine), [normalise(r) for r in others]
    matches = [other == mine for other in others]
    total = sum(matches)
    return sum(min(1.0, (total - match) / 3) for match in matches) / len(matches)


def _one_line(text: str) -> str:
    return text.replace("\n", " ").replace("\t", " ").strip()
