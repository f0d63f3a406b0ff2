"""Expected values are derived from KILT's rules, stated beside each case. No package has the scorer."""

import pytest

from rag_mm.evaluate.scoring.kilt import answer_scores, hits_in_rank, r_precision, recall_at

# Three evidence sets of 2, 1 and 3 pages.
SETS = [("1", "2"), ("5",), ("7", "9", "11")]


@pytest.mark.parametrize(
    ("retrieved", "expected", "why"),
    [
        (
            ["2", "5", "7", "33", "1", "9"],
            1 / 2,
            "R=2: {2,5} of {1,2}: 1/2; R=1: 2 is not 5; R=3: {2,5,7}: 1/3; best 1/2",
        ),
        (["5"], 1.0, "R=1: the set {5} is complete"),
        (["2", "1"], 1.0, "both pages of {1,2}, in any order"),
        (["9", "9", "7", "11"], 1.0, "a page named twice counts once: 9, 7, 11"),
        (["3", "5", "1", "2"], 0.0, "among the first 1, 2, 3 pages: none of {5}; 0 of {1,2}; 0 of {7,9,11}"),
        (["3", "1", "5"], 1 / 2, "R=2: 1 of {1,2}"),
        ([], 0.0, "nothing retrieved"),
    ],
)
def test_r_precision_is_the_best_over_evidence_sets(retrieved: list[str], expected: float, why: str) -> None:
    assert r_precision(retrieved, SETS) == pytest.approx(expected), why


def test_r_precision_without_evidence_is_zero() -> None:
    assert r_precision(["1"], []) == 0.0
    assert r_precision(["1"], [()]) == 0.0


def test_a_set_is_found_where_its_last_page_is() -> None:
    # 2: set A begun (place 1). 5: set B complete. 7: set C begun. 33: nothing. 1: A complete, its place 1 is given up.
    # 9: C moves down. 44, 88: nothing. The ranking is B, -, A, C (incomplete), -, -.
    retrieved = ["2", "5", "7", "33", "1", "9", "44", "88"]
    assert hits_in_rank(retrieved, SETS) == [True, False, True, False, False, False]
    assert recall_at(1, retrieved, SETS) == pytest.approx(1 / 3)
    assert recall_at(2, retrieved, SETS) == pytest.approx(1 / 3)
    assert recall_at(3, retrieved, SETS) == pytest.approx(2 / 3)
    assert recall_at(5, retrieved, SETS) == pytest.approx(2 / 3)


def test_recall_corner_cases() -> None:
    assert recall_at(5, ["5"], SETS) == pytest.approx(1 / 3)
    assert recall_at(100, ["11", "9", "7"], SETS) == pytest.approx(1 / 3)  # k larger than the list
    assert recall_at(5, ["1", "2"], [("2", "1"), ("1", "2")]) == 1.0  # the same set twice is one set
    assert recall_at(5, ["1"], [("1",), ()]) == pytest.approx(1 / 2)  # an empty set counts, and is never found
    assert recall_at(5, [], SETS) == recall_at(5, ["1"], []) == 0.0


def test_a_page_of_two_sets_serves_both() -> None:
    # 1 begins both; 2 completes the first; 3 completes the second: both places of 1 are given up.
    assert hits_in_rank(["1", "2", "3"], [("1", "2"), ("1", "3")]) == [True, True]


@pytest.mark.parametrize(
    ("answer", "golds", "accuracy", "em", "f1", "rouge_l"),
    [
        ("Paris", ["Paris", "paris, France"], 1, 1, 1, 1),
        (" Paris ", ["Paris"], 1, 1, 1, 1),  # spaces at the ends do not count
        ("the paris!", ["Paris"], 0, 1, 1, 0),  # accuracy and ROUGE-L compare as written
        ("city of Paris", ["Paris"], 0, 0, 0.5, 0.5),  # 1 of 3 words, 1 of 1 found: 2 * 1/3 / (4/3)
        ("Paris. Lyon.", ["Lyon", "Rome"], 0, 0, 2 / 3, 2 / 3),  # best of the gold answers: 1 of 2, 1 of 1
        ("", ["Paris"], 0, 0, 0, 0),
        ("", ["", "the"], 0, 0, 0, 0),  # an empty answer is wrong even where nothing is left of the gold one
        ("the", ["a", "the"], 1, 1, 0, 1),  # equal once normalised, but no word is shared: F1 0 (SQuAD 2.0 says 1)
    ],
)
def test_answer_scores(answer: str, golds: list[str], accuracy: float, em: float, f1: float, rouge_l: float) -> None:
    approximately = {"f1": pytest.approx(f1), "rouge_l": pytest.approx(rouge_l)}
    assert answer_scores(answer, golds) == {"accuracy": accuracy, "em": em, **approximately}


def test_no_gold_answer_is_an_error() -> None:
    with pytest.raises(ValueError, match="no gold answer"):
        answer_scores("x", ["", "  "])
