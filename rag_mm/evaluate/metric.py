"""Metrics as functions of weighted examples, so that one bootstrap serves them all.

Scoring fills a table: one row an example, one column a quantity (right or wrong, a rank, counts of n-grams). A metric
says how columns become a figure when each example counts ``weight`` times. Most are functions of weighted column sums
(`OfSums`: a mean is sum over count, BLEU and harmonic means are functions of several); resampling then is one matrix
product. Medians and means over classes are not and work on the weights themselves.

NaN in a column means that the quantity does not apply to the example: it is in no sum and in no count.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
from numpy.typing import NDArray

Array = NDArray[numpy.float64]


class Metric(ABC):
    """A named figure.

    Attributes:
        name: key of the figure in results.
        definition: what it is, in words.
        columns: names of the columns it needs.
    """

    name: str
    definition: str
    columns: tuple[str, ...]

    @abstractmethod
    def over(self, values_ES: Array, weights_DE: Array) -> Array:
        """The figure of D weightings of E examples, shape (D,); NaN where nothing has weight.

        Args:
            values_ES: the columns, side by side.
            weights_DE: how often each example counts.
        """

    def of(self, columns: Mapping[str, Array]) -> float:
        """The figure where every example counts once."""
        values = self.stack(columns)
        return float(self.over(values, numpy.ones((1, len(values))))[0])

    def stack(self, columns: Mapping[str, Array]) -> Array:
        """The columns it needs, shape (E, S)."""
        return numpy.stack([columns[name] for name in self.columns], axis=1).astype(numpy.float64)


@dataclass(frozen=True)
class OfSums(Metric):
    """A function of weighted sums.

    Attributes:
        combine: from sums of shape (D, 2S), the S columns' sums and then how many examples each applies to, to (D,).
    """

    name: str
    definition: str
    columns: tuple[str, ...]
    combine: Callable[[Array], Array] = field(repr=False)

    def summands(self, values_ES: Array) -> Array:
        """What is summed, shape (E, 2S): NaN as 0 beside a column that says where there was none."""
        there = ~numpy.isnan(values_ES)
        return numpy.concatenate([numpy.where(there, values_ES, 0.0), there.astype(numpy.float64)], axis=1)

    def over(self, values_ES: Array, weights_DE: Array) -> Array:
        return self.combine(weights_DE @ self.summands(values_ES))


def mean(name: str, definition: str, column: str = "") -> OfSums:
    """The mean of a column (by default of the same name) over the examples that it applies to."""
    return OfSums(name, definition, (column or name,), _mean)


def _mean(sums_DS: Array) -> Array:
    return ratio(sums_DS[:, 0], sums_DS[:, 1])


def ratio(above: Array, below: Array) -> Array:
    """``above / below``, NaN where ``below`` is 0."""
    return numpy.divide(above, below, out=numpy.full_like(above, numpy.nan), where=below != 0)


@dataclass(frozen=True)
class Median(Metric):
    """The weighted median of a column: the mean of the two middle values where the number of examples is even.

    A second column, where there is one, numbers groups: the mean of the groups' medians.
    """

    name: str
    definition: str
    columns: tuple[str, ...]

    def over(self, values_ES: Array, weights_DE: Array) -> Array:
        there = ~numpy.isnan(values_ES[:, 0])
        values, weights = values_ES[there], weights_DE[:, there]
        if values.shape[1] == 1:
            return _medians(values[:, 0], weights)
        groups = [values[:, 1] == group for group in numpy.unique(values[:, 1])]
        medians = numpy.stack([_medians(values[group, 0], weights[:, group]) for group in groups])
        count = (~numpy.isnan(medians)).sum(axis=0).astype(numpy.float64)
        return ratio(numpy.nansum(medians, axis=0), count)


def _medians(values_E: Array, weights_DE: Array) -> Array:
    order = numpy.argsort(values_E, kind="stable")
    values, found = values_E[order], numpy.full(len(weights_DE), numpy.nan)
    for i, ends in enumerate(numpy.cumsum(weights_DE[:, order], axis=1) if values.size else ()):
        total = ends[-1]
        if total > 0:  # with every weight 1: the values at (total - 1) // 2 and total // 2, from 0
            low = numpy.searchsorted(ends, (total - 1) // 2, side="right")
            high = numpy.searchsorted(ends, total // 2, side="right")
            found[i] = (values[low] + values[high]) / 2
    return found


@dataclass(frozen=True)
class MeanOverClasses(Metric):
    """The mean over classes of the mean of a column within a class, so that rare classes count as much as others.

    The second column numbers the class of each example. A class without weight in a resampling is left out of it.
    """

    name: str
    definition: str
    columns: tuple[str, ...]

    def over(self, values_ES: Array, weights_DE: Array) -> Array:
        order = numpy.argsort(values_ES[:, 1], kind="stable")
        value, label = values_ES[order, 0], values_ES[order, 1]
        starts = numpy.flatnonzero(numpy.r_[True, label[1:] != label[:-1]])
        weights = weights_DE[:, order]
        count = numpy.add.reduceat(weights, starts, axis=1)
        within = ratio(numpy.add.reduceat(weights * value, starts, axis=1), count)
        return ratio(numpy.nansum(within, axis=1), (count > 0).sum(axis=1).astype(numpy.float64))


@dataclass(frozen=True)
class Scores:
    """A scored prediction file.

    Attributes:
        ids: of the examples, in the order of the references.
        units: what each example is resampled with: its own id, or what it shares with others that are not independent
            of it (the five captions of an image).
        columns: a value an example each; NaN where it does not apply.
        metrics: the figures.
        context: what one must know to compare the figures with others: definitions, tokenisers, variants, counts.
        notes: sentences for people about what was not as it should be.
        aliases: short names for figures that have a longer one.
    """

    ids: tuple[str, ...]
    units: tuple[str, ...]
    columns: Mapping[str, Array]
    metrics: tuple[Metric, ...]
    context: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len(self.units) == len(self.ids)
        assert all(len(column) == len(self.ids) for column in self.columns.values())

    def results(self) -> dict[str, float]:
        """Figure by name."""
        return {metric.name: metric.of(self.columns) for metric in self.metrics}
