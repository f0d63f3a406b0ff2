from __future__ import annotations

from fractions import Fraction

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.mixture import Mixture, pattern, shares
from data.order import Order

WEIGHTS = st.lists(st.integers(1, 60), min_size=1, max_size=6)


def mixture(weights: list[int], sizes: list[int] | None = None) -> Mixture:
    parts = shares({str(i): w for i, w in enumerate(weights)})
    sizes = sizes or [7 + 5 * i for i in range(len(weights))]
    orders = tuple(Order(n, f"source {i}", 0, chunk=2, window=6) for i, n in enumerate(sizes))
    return Mixture(orders, tuple(parts.values()))


@given(weights=WEIGHTS, places=st.integers(1, 700))
def test_after_any_number_of_samples_each_source_has_its_share_to_within_one(weights: list[int], places: int):
    m = mixture(weights)
    sources = numpy.searchsorted(numpy.cumsum([o.num_samples for o in m.orders]), m.stream(0, places), side="right")
    counted = numpy.cumsum(sources[:, None] == numpy.arange(len(weights)), axis=0)
    due = numpy.arange(1, places + 1)[:, None] * numpy.array(weights)  # in parts of a sample, sum(weights) to one
    assert (numpy.abs(counted * sum(weights) - due) < sum(weights)).all()
    assert m.counts(places) == counted[-1].tolist()


@given(weights=WEIGHTS, start=st.integers(0, 2000), length=st.integers(0, 200), epochs=st.integers(1, 2))
def test_any_stretch_is_found_without_walking_there_and_epochs_of_a_source_are_exact(
    weights: list[int], start: int, length: int, epochs: int
):
    m = mixture(weights)
    whole = m.stream(0, start + length)
    assert m.stream(start, start + length).tolist() == whole[start:].tolist()
    base = 0
    for order in m.orders:  # the slow twin: what each source gives is its own stream, in its own order
        mine = whole[(whole >= base) & (whole < base + order.num_samples)] - base
        assert mine.tolist() == order.stream(0, len(mine)).tolist()
        base += order.num_samples


@given(weights=WEIGHTS, place=st.integers(0, 900))
def test_runs_cover_what_comes_before_the_next_window(weights: list[int], place: int):
    m = mixture(weights)
    end = m.window_end(place)
    known = {i for run in m.runs(place) for i in run}
    coming = set(m.stream(place, end).tolist())
    assert place < end and len(coming - known) <= len(weights)  # a share is kept to within one sample


def test_the_simple_rule_would_stray_further():
    """Serving who is furthest behind: a source strays by 1.14 of a sample."""
    weights = [1, 1, 1, 1, 37, 37]
    total, served, worst = sum(weights), [0] * len(weights), Fraction(0)
    for n in range(1, total + 1):
        behind = [Fraction(n * w, total) - s for w, s in zip(weights, served, strict=True)]
        served[behind.index(max(behind))] += 1
        worst = max(worst, *(abs(Fraction(n * w, total) - s) for w, s in zip(weights, served, strict=True)))
    assert worst >= 1
    test_after_any_number_of_samples_each_source_has_its_share_to_within_one.hypothesis.inner_test(weights, total)


def test_weights_count_as_they_are_written():
    assert shares({"a": 0.1, "b": 0.2}) == {"a": Fraction(1, 3), "b": Fraction(2, 3)}
    assert len(pattern(tuple(shares({"a": 0.7, "b": 0.3}).values()))) == 10


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({}, "at least one source"),
        ({"a": 1, "nq": 0}, "'nq' is 0"),
        ({"a": float("nan")}, "'a' is nan"),
        ({"a": 0.1234567, "b": 1}, "at most 100000 are allowed"),
    ],
)
def test_wrong_weights_are_named(weights: dict[str, float], said: str):
    with pytest.raises(ValueError, match=said):
        shares(weights)


def test_a_mixture_that_does_not_add_up_is_refused():
    orders = (Order(3, "a", 0), Order(3, "b", 0))
    with pytest.raises(ValueError, match="every source needs one of each"):
        Mixture(orders, (Fraction(1),))
    with pytest.raises(ValueError, match="sum to 1"):
        Mixture(orders, (Fraction(1, 2), Fraction(1, 3)))
