"""Weighted figures: a weight of n is n copies of the example, which is the slow twin of everything here."""

import statistics

import numpy
import pytest

from rag_mm.evaluate.metric import Array, MeanOverClasses, Median, Metric, OfSums, mean, ratio


def repeated(metric: Metric, columns: dict[str, Array], weights: Array) -> float:
    """The figure of a table in which every row stands as often as its weight says."""
    rows = numpy.repeat(numpy.arange(len(weights)), weights.astype(int))
    return metric.of({name: column[rows] for name, column in columns.items()})


METRICS = (
    mean("value", ""),
    Median("median", "", ("value",)),
    Median("median of groups", "", ("value", "group")),
    MeanOverClasses("by class", "", ("right", "group")),
    OfSums("ratio", "", ("value", "right"), lambda sums: ratio(sums[:, 0], sums[:, 1])),
)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_weights_are_copies(metric: Metric) -> None:
    generator = numpy.random.default_rng(0)
    columns = {
        "value": generator.integers(1, 9, size=30).astype(float),
        "right": generator.integers(2, size=30).astype(float),
        "group": generator.integers(3, size=30).astype(float),
    }
    columns["value"][:4] = numpy.nan
    if isinstance(metric, MeanOverClasses):
        columns["value"][:4] = 0
    weights = generator.integers(4, size=(20, 30)).astype(float)
    weights[:, 10] = 1  # never nothing
    expected = [repeated(metric, columns, row) for row in weights]
    numpy.testing.assert_allclose(metric.over(metric.stack(columns), weights), expected)


def test_median_by_hand() -> None:
    metric = Median("m", "", ("rank",))
    assert metric.of({"rank": numpy.array([3.0, 1.0, 2.0])}) == 2.0
    assert metric.of({"rank": numpy.array([3.0, 1.0, 2.0, 10.0])}) == 2.5  # the mean of the two in the middle
    values = numpy.random.default_rng(1).integers(1, 50, size=101).astype(float)
    assert metric.of({"rank": values}) == statistics.median(values)
    assert numpy.isnan(metric.of({"rank": numpy.array([numpy.nan])}))


def test_mean_over_classes_by_hand() -> None:
    """Class 0: 1 of 2 right, class 1: 1 of 1, so 3/4, though 2 of 3 are right."""
    columns = {"right": numpy.array([1.0, 0.0, 1.0]), "class": numpy.array([0.0, 0.0, 1.0])}
    assert MeanOverClasses("m", "", ("right", "class")).of(columns) == 0.75


def test_what_does_not_apply_is_in_no_sum_and_no_count() -> None:
    column = numpy.array([1.0, numpy.nan, 0.0, numpy.nan])
    assert mean("m", "").of({"m": column}) == 0.5
    assert numpy.isnan(mean("m", "").of({"m": column[1:2]}))
