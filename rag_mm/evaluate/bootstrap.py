"""How sure a figure is: percentile bootstrap intervals, and paired tests of two systems on the same examples.

Units are resampled, not examples, where examples of one unit are anything but independent: five captions of one
image, fourteen questions about one country (a wrongly retrieved flag spoils all of them). Intervals then come out
wider, and are right. All metrics of a table see the same resamplings, drawn from a seeded generator, so the same files
give the same intervals.

Two systems are compared in two ways that answer two questions. The interval of the difference: paired bootstrap, both
systems see the same resampled units. The p-value: randomisation test; if the systems were interchangeable, any unit's
two results could be swapped, so swap them at random and count how often the difference is at least as large as the
one found (two-sided, (1 + count) / (1 + draws), never 0). Of a mean this is the sign-flip permutation test.

Cost: drawing units is most of it, and grows with draws times units. Above `MERGE_ABOVE` units those with equal sums
(right, wrong, a few shades between) are merged, and a draw says how often each kind of unit came up: the same
distribution from a few numbers a draw, though not the same draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from rag_mm.evaluate.metric import Array, Metric, OfSums, Scores, mean

Groups = Mapping[str, Sequence[float]]
Interval = tuple[float, float, float]

DRAWS = 10000
MERGE_ABOVE = 20_000  # units; below, intervals stay those that were published
_CHUNK_CELLS = 4_000_000  # of a chunk of draws: 32 MB


@dataclass(frozen=True)
class Difference:
    """Two systems on one metric.

    Attributes:
        difference: the first minus the second.
        low, high: 95 % interval of it, paired bootstrap.
        p: of the randomisation test, two-sided.
    """

    difference: float
    low: float
    high: float
    p: float


def draws_of_units(num_units: int, *, draws: int, seed: int) -> Iterator[Array]:
    """How often each unit is drawn, in chunks of rows: ``num_units`` picks with replacement a row, ``draws`` rows."""
    generator = numpy.random.Generator(numpy.random.Philox(seed))
    for rows in _chunks(draws, num_units):
        pick = generator.integers(num_units, size=(rows, num_units))
        pick += numpy.arange(rows)[:, None] * num_units
        yield numpy.bincount(pick.ravel(), minlength=rows * num_units).reshape(rows, num_units).astype(numpy.float64)


def draws_of_kinds(counts_K: NDArray[numpy.int64], *, draws: int, seed: int) -> Iterator[Array]:
    """How often a unit of each kind is drawn where ``counts_K`` units are of each kind, in chunks of rows."""
    generator = numpy.random.Generator(numpy.random.Philox(seed))
    total = int(counts_K.sum())
    for rows in _chunks(draws, len(counts_K)):
        yield generator.multinomial(total, counts_K / total, size=rows).astype(numpy.float64)


def intervals(scores: Scores, *, seed: int = 0, draws: int = DRAWS) -> dict[str, tuple[float, float]]:
    """95 % interval of every metric; (NaN, NaN) where a metric has no value."""
    unit = _numbered(scores.units)
    tables = [_Resampled(metric, metric.stack(scores.columns), unit) for metric in scores.metrics]
    found: list[list[Array]] = [[] for _ in tables]
    counts = _merge(tables)
    for weights in _draws(counts, draws=draws, seed=seed):
        for table, values in zip(tables, found, strict=True):
            values.append(table.over(weights))
    return {t.metric.name: _percentiles(numpy.concatenate(values)) for t, values in zip(tables, found, strict=True)}


def compare(a: Scores, b: Scores, *, seed: int = 0, draws: int = DRAWS) -> dict[str, Difference]:
    """``a`` minus ``b`` on every metric that both have.

    Raises:
        ValueError: if the two are not about the same examples.
    """
    if a.ids != b.ids or a.units != b.units:
        raise ValueError("a paired comparison needs the same examples on both sides, in the same order")
    unit = _numbered(a.units)
    others = {metric.name: metric for metric in b.metrics}
    metrics = [metric for metric in a.metrics if metric.name in others]
    sides = [(_Resampled(m, m.stack(a.columns), unit), _Resampled(m, m.stack(b.columns), unit)) for m in metrics]
    samples: list[list[Array]] = [[] for _ in sides]
    counts = _merge([table for side in sides for table in side])
    for weights in _draws(counts, draws=draws, seed=seed):
        for (mine, other), values in zip(sides, samples, strict=True):
            values.append(mine.over(weights) - other.over(weights))
    found = {}
    for metric, (mine, other), values in zip(metrics, sides, samples, strict=True):
        difference = metric.of(a.columns) - metric.of(b.columns)
        low, high = _percentiles(numpy.concatenate(values))
        p = _randomisation(mine, other, difference, counts, seed=seed, draws=draws)
        found[metric.name] = Difference(difference, low, high, p)
    return found


def bootstrap(values: Groups, *, seed: int, draws: int = DRAWS) -> Interval:
    """Mean over all values and its 95 % interval, groups resampled with replacement.

    Args:
        values: the values of each group, for example one 0 or 1 a question, by country.

    Raises:
        ValueError: if there are no values.
    """
    scores = _of_groups(values)
    ((low, high),) = intervals(scores, seed=seed, draws=draws).values()
    return scores.results()["mean"], low, high


def paired_bootstrap(a: Groups, b: Groups, *, seed: int, draws: int = DRAWS) -> Interval:
    """Mean of ``a`` minus mean of ``b`` with its 95 % interval; both see the same resampled groups.

    Raises:
        ValueError: if the two do not have the same groups with as many values each, or no values.
    """
    if {g: len(v) for g, v in a.items()} != {g: len(v) for g, v in b.items()}:
        raise ValueError("a paired comparison needs the same groups with as many values on both sides")
    mine, other = _of_groups(a), _of_groups(b)
    difference = mine.columns["mean"] - other.columns["mean"]
    return bootstrap({g: difference[[u == g for u in mine.units]].tolist() for g in a}, seed=seed, draws=draws)


def _of_groups(values: Groups) -> Scores:
    names = sorted(group for group in values if len(values[group]))
    if not names:
        raise ValueError("there is nothing to resample: no group has a value")
    units = [group for group in names for _ in values[group]]
    column = numpy.array([value for group in names for value in values[group]], dtype=numpy.float64)
    return Scores(tuple(units), tuple(units), {"mean": column}, (mean("mean", ""),))


class _Resampled:
    """One metric's table, ready to be weighted by unit: sums are taken within units once, where sums will do."""

    def __init__(self, metric: Metric, values_ES: Array, unit_E: NDArray[numpy.int64]) -> None:
        self.metric, self.values, self.unit = metric, values_ES, unit_E
        self.sums_US: Array | None = None
        if isinstance(metric, OfSums):
            summands = metric.summands(values_ES)
            self.sums_US = numpy.zeros((int(unit_E.max()) + 1, summands.shape[1]))
            numpy.add.at(self.sums_US, unit_E, summands)

    def over(self, weights_DU: Array) -> Array:
        if self.sums_US is not None:
            assert isinstance(self.metric, OfSums)
            return self.metric.combine(weights_DU @ self.sums_US)
        return self.metric.over(self.values, weights_DU[:, self.unit])


def _merge(tables: Sequence[_Resampled]) -> NDArray[numpy.int64]:
    """How many units each row of the tables' sums now stands for: one, unless many units are alike in all of them."""
    num_units = int(tables[0].unit.max()) + 1 if tables else 0
    ones = numpy.ones(num_units, dtype=numpy.int64)
    sums = [table.sums_US for table in tables if table.sums_US is not None]
    if num_units <= MERGE_ABOVE or len(sums) < len(tables):
        return ones
    _, first, counts = numpy.unique(numpy.concatenate(sums, axis=1), axis=0, return_index=True, return_counts=True)
    if len(counts) > num_units // 4:
        return ones
    for table, sums_US in zip(tables, sums, strict=True):
        table.sums_US = sums_US[first]
    return counts.astype(numpy.int64)


def _draws(counts_K: NDArray[numpy.int64], *, draws: int, seed: int) -> Iterator[Array]:
    if (counts_K == 1).all():
        return draws_of_units(len(counts_K), draws=draws, seed=seed)
    return draws_of_kinds(counts_K, draws=draws, seed=seed)


def _randomisation(
    a: _Resampled, b: _Resampled, difference: float, counts_K: NDArray[numpy.int64], *, seed: int, draws: int
) -> float:
    """Two-sided p-value of swapping the two results of every unit at random."""
    num_units = len(counts_K)
    generator = numpy.random.Generator(numpy.random.Philox(seed))
    least = abs(difference) - 1e-12 * max(1.0, abs(difference))  # rounding must not turn equal into smaller
    count, alone = 0, bool((counts_K == 1).all())
    for rows in _chunks(draws, num_units):
        swap_DU = (  # how many of the units of a kind
            generator.integers(2, size=(rows, num_units), dtype=numpy.uint8)
            if alone
            else generator.binomial(counts_K, 0.5, size=(rows, num_units))
        )
        if a.sums_US is not None and b.sums_US is not None:
            assert isinstance(a.metric, OfSums) and isinstance(b.metric, OfSums)
            moved = swap_DU.astype(numpy.float64) @ (b.sums_US - a.sums_US)
            mine = a.metric.combine(counts_K @ a.sums_US + moved)
            other = b.metric.combine(counts_K @ b.sums_US - moved)
            count += int((numpy.abs(mine - other) >= least).sum())
            continue
        once = numpy.ones((1, len(a.values)))
        for swap_U in swap_DU:
            swapped = swap_U.astype(bool)[a.unit][:, None]
            mine = a.metric.over(numpy.where(swapped, b.values, a.values), once)
            other = b.metric.over(numpy.where(swapped, a.values, b.values), once)
            count += int(abs(mine[0] - other[0]) >= least)
    return (1 + count) / (1 + draws)


def _numbered(units: Sequence[str]) -> NDArray[numpy.int64]:
    """Units as numbers, in the order of their names: draws do not depend on the order of a file."""
    number = {unit: i for i, unit in enumerate(sorted(set(units)))}
    return numpy.array([number[unit] for unit in units], dtype=numpy.int64)


def _chunks(draws: int, width: int) -> Iterator[int]:
    """Rows of each chunk."""
    size = max(1, _CHUNK_CELLS // max(width, 1))
    for start in range(0, draws, size):
        yield min(size, draws - start)


def _percentiles(values: Array) -> tuple[float, float]:
    values = values[~numpy.isnan(values)]
    if not values.size:
        return numpy.nan, numpy.nan
    low, high = numpy.quantile(values, [0.025, 0.975])
    return float(low), float(high)
