"""Zero-shot classification files; mean per-class recall against scikit-learn's."""

from pathlib import Path

import numpy
import pytest
from sklearn.metrics import balanced_accuracy_score

from rag_mm.evaluate.prediction_files import FileError
from rag_mm.evaluate.tasks.zero_shot import ZeroShot
from tests.rag_mm.evaluate.tasks.files import score, write

GOLD = [{"id": 1, "label": "cat"}, {"id": 2, "label": "cat"}, {"id": 3, "label": "dog"}]


def test_values_by_hand(tmp_path: Path) -> None:
    predictions = [
        {"id": 1, "ranked": ["cat", "dog"]},
        {"id": 2, "scores": {"dog": 0.5, "cat": 0.5}},  # a tie: the right one stands behind
        {"id": 3, "label": "dog"},
    ]
    found = score(ZeroShot(k=(1, 2)), write(tmp_path / "p.jsonl", predictions), write(tmp_path / "r.jsonl", GOLD))
    assert found.results() == {"hit@1": pytest.approx(2 / 3), "hit@2": 1.0, "mean_per_class_recall": 0.75}
    assert found.notes == ("k=2: the shortest prediction has 1 labels",)
    assert found.context["num_classes"] == 2


def test_mean_per_class_recall_is_sklearns_balanced_accuracy(tmp_path: Path) -> None:
    generator = numpy.random.default_rng(0)
    gold, guess = generator.integers(5, size=80), generator.integers(5, size=80)
    references = write(tmp_path / "r.jsonl", [{"id": i, "label": str(g)} for i, g in enumerate(gold)])
    predictions = write(tmp_path / "p.jsonl", [{"id": i, "label": str(g)} for i, g in enumerate(guess)])
    found = score(ZeroShot(k=(1,)), predictions, references).results()
    assert found["mean_per_class_recall"] == pytest.approx(balanced_accuracy_score(gold, guess))


def test_how_to_ask() -> None:
    task = ZeroShot(templates=("a photo of a {}.", "{}"), classes=("cat", "dog"))
    assert task.prompts() == {"cat": ["a photo of a cat.", "cat"], "dog": ["a photo of a dog.", "dog"]}
    assert task.ask("7", "cat").candidates == ("cat", "dog")
    with pytest.raises(ValueError, match="template 'no place'"):
        ZeroShot(templates=("no place",))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"id": 1, "ranked": ["cat", "cat"]}, "none twice"),
        ({"id": 1, "ranked": []}, "at least one label"),
        ({"id": 1, "scores": {"cat": "high"}}, "field scores.cat is 'high'"),
        ({"id": 1}, "is missing"),
    ],
)
def test_mistakes(tmp_path: Path, line: dict, message: str) -> None:
    with pytest.raises(FileError, match=message):
        score(ZeroShot(), write(tmp_path / "p.jsonl", [line]), write(tmp_path / "r.jsonl", GOLD))
