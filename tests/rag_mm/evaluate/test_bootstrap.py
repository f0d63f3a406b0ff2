"""Intervals and tests against values that are known, and against slow twins that resample row by row."""

import itertools
import math

import numpy
import pytest

from rag_mm.evaluate.bootstrap import bootstrap, compare, draws_of_units, intervals, paired_bootstrap
from rag_mm.evaluate.metric import Array, Median, Metric, OfSums, Scores, mean, ratio


def scores(columns: dict[str, Array], metrics: tuple[Metric, ...], units: tuple[str, ...] | None = None) -> Scores:
    ids = tuple(str(i) for i in range(len(next(iter(columns.values())))))
    return Scores(ids, units or ids, columns, metrics)


def test_bootstrap_resamples_groups_and_weighs_them_by_their_questions() -> None:
    groups = {"np": [1.0, 1.0, 1.0], "pe": [0.0]}
    value, low, high = bootstrap(groups, seed=0)
    assert value == 0.75
    # A draw of two groups is (np, np): 1, mixed: 3/4, (pe, pe): 0, with probability 1/4, 1/2, 1/4.
    assert (low, high) == (0.0, 1.0)
    assert bootstrap({"np": [1.0, 1.0], "pe": [1.0]}, seed=0) == (1.0, 1.0, 1.0)


def test_bootstrap_interval_is_that_of_the_mean_of_independent_groups() -> None:
    values = numpy.random.default_rng(1).normal(size=400)
    value, low, high = bootstrap({str(i): [float(v)] for i, v in enumerate(values)}, seed=0)
    half = 1.96 * values.std() / 20
    assert value == pytest.approx(values.mean())
    assert (low, high) == (
        pytest.approx(value - half, abs=0.1 * half),
        pytest.approx(value + half, abs=0.1 * half),
    )


def test_paired_bootstrap_pairs() -> None:
    """Where one system is better by the same amount in every group, pairing leaves no doubt."""
    a = {str(i): [i / 10 + 0.25] for i in range(10)}
    b = {str(i): [i / 10] for i in range(10)}
    assert paired_bootstrap(a, b, seed=0) == pytest.approx((0.25, 0.25, 0.25))
    assert paired_bootstrap(a, b, seed=3) == paired_bootstrap(a, b, seed=3)
    with pytest.raises(ValueError, match="same groups"):
        paired_bootstrap(a, {**b, "10": [0.0]}, seed=0)
    with pytest.raises(ValueError, match="nothing to resample"):
        paired_bootstrap({}, {}, seed=0)


def test_published_intervals_stay() -> None:
    """The draws of a seed are part of published figures: worked once by picking rows with the same generator."""
    generator = numpy.random.Generator(numpy.random.Philox(7))
    pick = generator.integers(5, size=(1000, 5))
    values = numpy.array([0.0, 1.0, 1.0, 0.5, 0.25])
    low, high = numpy.quantile(values[pick].mean(1), [0.025, 0.975])
    found = bootstrap({f"g{i}": [float(v)] for i, v in enumerate(values)}, seed=7, draws=1000)
    assert found == pytest.approx((values.mean(), low, high))


def test_chunks_of_draws_do_not_change_them(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = numpy.concatenate(list(draws_of_units(7, draws=50, seed=1)))
    monkeypatch.setattr("rag_mm.evaluate.bootstrap._CHUNK_CELLS", 20)
    parts = list(draws_of_units(7, draws=50, seed=1))
    assert len(parts) == 25
    numpy.testing.assert_array_equal(numpy.concatenate(parts), whole)
    assert (whole.sum(1) == 7).all()


def test_intervals_are_those_of_copied_rows() -> None:
    """Slow twin: for every draw the table is built with each unit's rows as often as it was drawn."""
    generator = numpy.random.default_rng(2)
    units = tuple(f"u{i // 3}" for i in range(24))
    columns = {"a": generator.normal(size=24), "b": generator.random(24) + 1}
    metrics = (mean("a", ""), Median("m", "", ("a",)), OfSums("r", "", ("a", "b"), lambda s: ratio(s[:, 0], s[:, 1])))
    table = scores(columns, metrics, units)
    found = intervals(table, seed=5, draws=200)
    drawn = numpy.concatenate(list(draws_of_units(8, draws=200, seed=5))).astype(int)
    for metric in metrics:
        values = []
        for row in drawn:
            rows = [i for unit in range(8) for _ in range(row[unit]) for i in range(3 * unit, 3 * unit + 3)]
            values.append(metric.of({name: column[rows] for name, column in columns.items()}))
        assert found[metric.name] == pytest.approx(tuple(numpy.quantile(values, [0.025, 0.975])))


def test_merged_units_have_the_same_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin draws every unit. Percentiles of 4,000 draws agree to a few hundredths of the interval's width."""
    generator = numpy.random.default_rng(6)
    units = tuple(str(max(i, 20)) for i in range(800))  # the first 21 are one unit
    tables = []
    for share in (0.6, 0.55):
        right = (generator.random(800) < share).astype(float)
        right[:9] = numpy.nan
        columns = {"em": right, "score": generator.integers(2, size=800).astype(float)}
        metrics = (mean("em", ""), OfSums("r", "", ("em", "score"), lambda s: ratio(s[:, 0], s[:, 1])))
        tables.append(scores(columns, metrics, units))
    apart = intervals(tables[0], draws=4000), compare(*tables, draws=4000)
    monkeypatch.setattr("rag_mm.evaluate.bootstrap.MERGE_ABOVE", 100)
    monkeypatch.setattr("rag_mm.evaluate.bootstrap.draws_of_units", None)  # not called: all are merged
    merged = intervals(tables[0], draws=4000), compare(*tables, draws=4000)
    for name in ("em", "r"):
        width = apart[0][name][1] - apart[0][name][0]
        assert merged[0][name] == pytest.approx(apart[0][name], abs=0.08 * width)
        one, other = merged[1][name], apart[1][name]
        assert one.difference == pytest.approx(other.difference)
        width = other.high - other.low
        assert (one.low, one.high) == pytest.approx((other.low, other.high), abs=0.08 * width)
        assert one.p == pytest.approx(other.p, abs=0.03)


def test_units_that_are_all_different_are_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    table = scores({"m": numpy.random.default_rng(7).random(200)}, (mean("m", ""),))
    before = intervals(table, draws=200)
    monkeypatch.setattr("rag_mm.evaluate.bootstrap.MERGE_ABOVE", 100)
    assert intervals(table, draws=200) == before


def test_units_widen_intervals() -> None:
    """Five copies of the same answer are one observation: the interval of the units is about sqrt(5) times as wide."""
    values = numpy.random.default_rng(3).integers(2, size=200).astype(float).repeat(5)
    units = tuple(str(i // 5) for i in range(1000))
    low, high = intervals(scores({"m": values}, (mean("m", ""),), units), draws=2000)["m"]
    low_apart, high_apart = intervals(scores({"m": values}, (mean("m", ""),)), draws=2000)["m"]
    assert (high - low) / (high_apart - low_apart) == pytest.approx(math.sqrt(5), rel=0.1)


def test_p_value_is_that_of_the_exact_sign_flip_test() -> None:
    """All 2^8 flips of eight differences, against 20,000 random ones: standard error below .004."""
    a = numpy.array([1.0, 0.9, 0.7, 0.8, 0.4, 0.6, 0.9, 0.2])
    b = numpy.array([0.5, 0.6, 0.8, 0.1, 0.3, 0.7, 0.2, 0.1])
    flips = [abs(numpy.dot(signs, a - b)) for signs in itertools.product((-1, 1), repeat=8)]
    exact = numpy.mean([flip >= abs((a - b).sum()) - 1e-12 for flip in flips])
    for metric in (mean("m", ""), OfSums("m", "", ("m",), lambda s: ratio(s[:, 0], s[:, 1]))):
        found = compare(scores({"m": a}, (metric,)), scores({"m": b}, (metric,)), draws=20000)["m"]
        assert found.difference == pytest.approx((a - b).mean())
        assert found.p == pytest.approx(exact, abs=0.012)


def test_p_value_of_a_median_is_counted_by_swapping_rows() -> None:
    """Against the sixteen swaps of four pairs."""
    a, b = numpy.array([1.0, 5.0, 2.0, 8.0]), numpy.array([4.0, 6.0, 9.0, 7.0])
    metric = Median("m", "", ("m",))
    observed = abs(numpy.median(a) - numpy.median(b))
    swapped = [
        abs(numpy.median(numpy.where(s, b, a)) - numpy.median(numpy.where(s, a, b))) >= observed
        for s in itertools.product((False, True), repeat=4)
    ]
    found = compare(scores({"m": a}, (metric,)), scores({"m": b}, (metric,)), draws=2000)["m"]
    assert found.difference == numpy.median(a) - numpy.median(b)
    assert found.p == pytest.approx(numpy.mean(swapped), abs=0.04)


def test_equal_systems_do_not_differ_and_p_is_never_zero() -> None:
    values = numpy.random.default_rng(4).random(50)
    same = compare(scores({"m": values}, (mean("m", ""),)), scores({"m": values}, (mean("m", ""),)), draws=500)["m"]
    assert (same.difference, same.low, same.high, same.p) == (0.0, 0.0, 0.0, 1.0)
    apart = compare(scores({"m": values + 9}, (mean("m", ""),)), scores({"m": values}, (mean("m", ""),)), draws=500)[
        "m"
    ]
    assert apart.p == pytest.approx(1 / 501)
    assert apart.low == pytest.approx(9.0) == apart.high


def test_under_the_null_p_is_uniform() -> None:
    """Two systems drawn alike: p <= .2 in a fifth of the cases (150 of them: standard error .033)."""
    generator = numpy.random.default_rng(5)
    small = 0
    for _ in range(150):
        a, b = generator.random((2, 30))
        small += (
            compare(scores({"m": a}, (mean("m", ""),)), scores({"m": b}, (mean("m", ""),)), draws=200)["m"].p <= 0.2
        )
    assert small / 150 == pytest.approx(0.2, abs=0.1)


def test_a_comparison_needs_the_same_examples() -> None:
    one = scores({"m": numpy.zeros(3)}, (mean("m", ""),))
    other = Scores(("0", "1", "x"), ("0", "1", "x"), one.columns, one.metrics)
    with pytest.raises(ValueError, match="same examples"):
        compare(one, other)


def test_nothing_to_resample_has_no_interval() -> None:
    low, high = intervals(scores({"m": numpy.array([numpy.nan, numpy.nan])}, (mean("m", ""),)), draws=100)["m"]
    assert math.isnan(low) and math.isnan(high)
