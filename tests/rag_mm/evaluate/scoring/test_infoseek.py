"""No package has InfoSeek's scorer: values are worked by hand from its published rules, stated beside the case."""

import pytest

from rag_mm.evaluate.scoring.infoseek import (
    harmonic_mean,
    infoseek_score,
    intersection_over_union,
    number_is_right,
    parse_number,
)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("about 3.5 km", 3.5),
        ("1,234 m", 1234.0),
        ("1,23", (1.0, 23.0)),  # a comma groups three digits: these are two numbers
        ("9-10", (9.0, 10.0)),  # a hyphen after a digit is a range
        ("9 to 10 or 11", (9.0, 10.0)),  # the first two
        ("10-9", 10.0),  # descending: the first
        ("-5", -5.0),
        ("from -5 to 5", (-5.0, 5.0)),
        ("1e3", 1000.0),
        (".5", 5.0),  # periods at the ends are stripped
        ("5.", 5.0),
        ("1.2.3", (1.2, 3.0)),  # 1.2, then .3 stripped to 3
        ("none", (0.0, 0.0)),
        ("", (0.0, 0.0)),
        ("-.5.3", (0.0, 0.0)),  # found whole; cut at its first period, no number is left
    ],
)
def test_parse_number(text: str, number: float | tuple[float, float]) -> None:
    assert parse_number(text) == number


@pytest.mark.parametrize(
    ("answer", "gold", "right", "why"),
    [
        (0.9, (0.9, 1.1), True, "ends are included"),
        (1.1, (0.9, 1.1), True, "both"),
        (1.2, (0.9, 1.1), False, "outside"),
        ((0.95, 1.05), (0.9, 1.1), True, "a range inside"),
        ((0.0, 10.0), (0.0, 5.0), True, "overlap 5, union 10: one half is enough"),
        ((0.0, 10.1), (0.0, 5.0), False, "5 / 10.1"),
        ((2.0, 8.0), (0.0, 5.0), False, "overlap 3, union 8"),
        ((1.0, 6.0), (0.0, 5.0), True, "overlap 4, union 6"),
        ((0.0, 0.0), (-1.0, 1.0), True, "no number in the answer is the range 0 to 0, inside"),
        ((0.0, 0.0), (1.0, 2.0), False, "and outside"),
    ],
)
def test_number_is_right(answer: float | tuple[float, float], gold: tuple[float, float], right: bool, why: str) -> None:
    assert number_is_right(answer, gold) is right, why


def test_intersection_over_union() -> None:
    assert intersection_over_union((0, 2), (1, 3)) == pytest.approx(1 / 3)
    assert intersection_over_union((0, 1), (2, 3)) == 0.0
    assert intersection_over_union((1, 1), (1, 1)) == 0.0  # points have no length


def test_scores_by_kind_of_question() -> None:
    assert infoseek_score("The Alps!", ["alps", "Alpine mountains"], numerical=False) == 1.0
    assert infoseek_score("Alpine", ["alps", "Alpine mountains"], numerical=False) == 0.0
    assert infoseek_score("1995", ["1995", "May 1995"], numerical=False) == 1.0
    assert infoseek_score("it is 4,808 metres", (4327.2, 5288.8), numerical=True) == 1.0
    assert infoseek_score("", (4327.2, 5288.8), numerical=True) == 0.0


def test_harmonic_mean() -> None:
    assert harmonic_mean(0.2, 0.3) == pytest.approx(0.24)  # 2 * .06 / .5
    assert harmonic_mean(0.5, 0.5) == pytest.approx(0.5)
    assert harmonic_mean(0.5, 0.0) == pytest.approx(0.0, abs=1e-11)
    assert harmonic_mean(0.0, 0.0) == pytest.approx(0.0, abs=1e-11)
