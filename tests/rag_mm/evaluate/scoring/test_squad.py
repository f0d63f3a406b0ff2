"""Values by hand from the conventions of SQuAD's scorer, and parity with torchmetrics' implementation of it."""

import itertools
import random
from collections.abc import Sequence

import pytest
from torchmetrics.functional.text import squad as torchmetrics_squad

from rag_mm.evaluate.scoring.squad import exact_match, f1, maximum_over, normalise_answer
from tests.rag_mm.evaluate.scoring.nasty import TEXTS, sentence


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
        ("A\u00a0B", "b"),  # a no-break space is a space, and then "a" is an article
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


def theirs(pairs: Sequence[tuple[str, Sequence[str]]]) -> tuple[float, float]:
    """Mean EM and F1 of answers with their golds, as fractions."""
    predictions = [{"id": str(i), "prediction_text": answer} for i, (answer, _) in enumerate(pairs)]
    targets = [
        {"id": str(i), "answers": {"text": list(golds), "answer_start": [0] * len(golds)}}
        for i, (_, golds) in enumerate(pairs)
    ]
    found = torchmetrics_squad(predictions, targets)
    return float(found["exact_match"]) / 100, float(found["f1"]) / 100


def test_parity_with_torchmetrics_on_every_nasty_pair() -> None:
    for answer, gold in itertools.product(TEXTS, TEXTS):
        assert (exact_match(answer, gold), f1(answer, gold)) == pytest.approx(theirs([(answer, [gold])])), (
            answer,
            gold,
        )


def test_parity_with_torchmetrics_over_several_gold_answers() -> None:
    generator = random.Random(0)
    pairs, ours = [], []
    for _ in range(300):
        golds = [sentence(generator) for _ in range(generator.randint(1, 4))]
        answer = generator.choice([*golds, sentence(generator), ""])
        pairs.append((answer, golds))
        ours.append((maximum_over(exact_match, answer, golds), maximum_over(f1, answer, golds)))
    means = tuple(sum(values) / len(ours) for values in zip(*ours, strict=True))
    assert means == pytest.approx(theirs(pairs), abs=1e-5)
