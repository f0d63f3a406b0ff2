"""The values are worked by hand from the conventions of SQuAD's scorer."""

import numpy
import pytest

from rag_mm.evaluate.metrics import (
    bootstrap,
    exact_match,
    f1,
    maximum_over,
    normalise_answer,
    paired_bootstrap,
)


@pytest.mark.parametrize(
    ("text", "normalised"),
    [
        ("The  United States!", "united states"),
        ("an apple a day", "apple day"),
        ("Theatre", "theatre"),  # an article only as a word
        (".np", "np"),
        ("N'Djamena", "ndjamena"),
        ("Yaoundé", "yaoundé"),
        ("«El Aaiún»", "«el aaiún»"),  # only ASCII punctuation goes
        ("the", ""),
    ],
)
def test_normalise_answer(text: str, normalised: str) -> None:
    assert normalise_answer(text) == normalised


def test_exact_match_and_f1() -> None:
    assert exact_match("the Kathmandu.", "kathmandu") == 1.0
    assert exact_match("Kathmandu", "Pokhara") == 0.0
    # 2 of 3 words right, 2 of 2 found: P 2/3, R 1
    assert f1("constitutional federal monarchy", "constitutional monarchy") == pytest.approx(0.8)
    assert f1("1 1 2", "1 2 2") == pytest.approx(2 / 3)  # a multiset: one 1 and one 2 are shared
    assert f1("", "") == f1("the", "a") == 1.0
    assert f1("", "x") == f1("x", "the") == 0.0


def test_maximum_over_the_accepted_answers() -> None:
    assert maximum_over(exact_match, "Rome", ["Vatican City", "rome"]) == 1.0
    assert maximum_over(f1, "Vatican", ["Rome", "Vatican City"]) == pytest.approx(2 / 3)
    with pytest.raises(ValueError):
        maximum_over(f1, "x", [])


def test_bootstrap_resamples_groups_and_weighs_them_by_their_questions() -> None:
    groups = {"np": [1.0, 1.0, 1.0], "pe": [0.0]}
    mean, low, high = bootstrap(groups, seed=0)
    assert mean == 0.75
    # A draw of two groups is (np, np): 1, mixed: 3/4, (pe, pe): 0, with probability 1/4, 1/2, 1/4.
    assert (low, high) == (0.0, 1.0)
    assert bootstrap({"np": [1.0, 1.0], "pe": [1.0]}, seed=0) == (1.0, 1.0, 1.0)


def test_bootstrap_interval_is_that_of_the_mean_of_independent_groups() -> None:
    values = numpy.random.default_rng(1).normal(size=400)
    mean, low, high = bootstrap({str(i): [float(v)] for i, v in enumerate(values)}, seed=0)
    half = 1.96 * values.std() / 20
    assert mean == pytest.approx(values.mean())
    assert (low, high) == (
        pytest.approx(mean - half, abs=0.1 * half),
        pytest.approx(mean + half, abs=0.1 * half),
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
