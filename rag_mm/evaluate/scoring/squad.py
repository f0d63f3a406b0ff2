"""Exact match and F1 of answers, the way SQuAD's scorers compare strings.

Lower case, ASCII punctuation stripped, a/an/the dropped, spaces squeezed; the best of the accepted answers counts.
KILT, DPR, Atlas and InfoSeek normalise in the same way. The scorers differ in one case only: where neither answer nor
gold has a word left, SQuAD 2.0's (and this) F1 is 1, SQuAD 1.1's and KILT's is 0 (`scoring.kilt` follows KILT).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise_answer(text: str) -> str:
    """Lower case, no ASCII punctuation, no a/an/the, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, gold: str) -> float:
    """1 if both are the same once normalised, else 0."""
    return float(normalise_answer(answer) == normalise_answer(gold))


def f1(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall over normalised words (a multiset); 1 if both have none."""
    mine, right = normalise_answer(answer).split(), normalise_answer(gold).split()
    if not mine or not right:
        return float(mine == right)
    common = (Counter(mine) & Counter(right)).total()
    return 2 * common / (len(mine) + len(right))


def maximum_over(metric: Callable[[str, str], float], answer: str, golds: Iterable[str]) -> float:
    """The best value of ``metric`` over the accepted answers.

    Raises:
        ValueError: if there is no accepted answer.
    """
    return max(metric(answer, gold) for gold in golds)
