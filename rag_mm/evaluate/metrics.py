"""Exact match, F1 and confidence intervals: pure functions of strings and numbers.

Strings are compared the way SQuAD does: lower-cased, ASCII punctuation stripped, articles dropped, spaces
squeezed, the best of the accepted answers counts. Questions about one country are anything but independent
(a wrongly retrieved flag spoils fourteen answers at once), so intervals resample countries, not questions:
they come out wider, and are right.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy

Groups = Mapping[str, Sequence[float]]
Interval = tuple[float, float, float]

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


def bootstrap(values: Groups, *, seed: int, draws: int = 10000) -> Interval:
    """Mean over all values and its 95 % interval, groups resampled with replacement.

    Args:
        values: the values of each group, for example one 0 or 1 a question, by country.

    Raises:
        ValueError: if there are no values.
    """
    zero = {group: [0.0] * len(items) for group, items in values.items()}
    return paired_bootstrap(values, zero, seed=seed, draws=draws)


def paired_bootstrap(a: Groups, b: Groups, *, seed: int, draws: int = 10000) -> Interval:
    """Mean of ``a`` minus mean of ``b`` with its 95 % interval; both see the same resampled groups.

    Raises:
        ValueError: if the two do not have the same groups with as many values each, or no values.
    """
    names = sorted(group for group in a if len(a[group]))
    count = numpy.array([len(a[group]) for group in names], dtype=numpy.float64)
    if {g: len(v) for g, v in a.items()} != {g: len(v) for g, v in b.items()}:
        raise ValueError("a paired comparison needs the same groups with as many values on both sides")
    if not names:
        raise ValueError("there is nothing to resample: no group has a value")
    difference = numpy.array([sum(a[group]) - sum(b[group]) for group in names])
    generator = numpy.random.Generator(numpy.random.Philox(seed))
    pick = generator.integers(len(names), size=(draws, len(names)))
    means = difference[pick].sum(1) / count[pick].sum(1)
    low, high = numpy.quantile(means, [0.025, 0.975])
    return float(difference.sum() / count.sum()), float(low), float(high)
