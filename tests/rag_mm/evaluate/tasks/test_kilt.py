"""KILT files end to end; values by hand from KILT's rules."""

from pathlib import Path
from typing import Any

import pytest

from rag_mm.evaluate.prediction_files import FileError
from rag_mm.evaluate.tasks.kilt import Kilt
from tests.rag_mm.evaluate.tasks.files import score, write

GOLD = [
    {"id": 1, "input": "who?", "output": [
        {"answer": "Ada", "provenance": [{"wikipedia_id": 5}]},
        {"answer": "Ada Lovelace", "provenance": [{"wikipedia_id": "6"}, {"wikipedia_id": "7"}]},
        {"provenance": [{"wikipedia_id": "5"}]},
    ]},
    {"id": 2, "input": "where?", "output": [{"answer": "Rome", "provenance": [{"wikipedia_id": "9"}]}]},
]  # fmt: skip


def guess(key: Any, answer: str, *pages: Any) -> dict[str, Any]:
    return {"id": key, "output": [{"answer": answer, "provenance": [{"wikipedia_id": page} for page in pages]}]}


def test_scores_by_hand(tmp_path: Path) -> None:
    """1: right answer, first page right: R-precision 1. 2: right answer, but the page second: R-precision 0."""
    predictions = write(tmp_path / "p.jsonl", [guess("1", "ada", 5, 7), guess(2, "Rome", "8", "9")])
    found = score(Kilt(), predictions, write(tmp_path / "r.jsonl", GOLD)).results()
    assert found == {
        "accuracy": 0.5,  # "ada" is not "Ada"
        "em": 1.0,
        "f1": 1.0,
        "rouge_l": pytest.approx(0.5),  # nor is it for ROUGE-L, in no gold answer
        "kilt_accuracy": 0.0,
        "kilt_em": 0.5,
        "kilt_f1": 0.5,
        "kilt_rouge_l": 0.0,  # 1: its pages count, its answer has 0; 2: the other way round
        "r_precision": 0.5,
        "recall@1": 0.25,  # 1: one of two different sets; 2: none
        "recall@5": 0.75,
    }


def test_long_answers(tmp_path: Path) -> None:
    """KILT-ROUGE-L: that of the answer whose page was found, over all questions.

    1: "Ada wrote it", best with "Ada" of the two gold answers: 1 of 3 words and 1 of 1: 1/2; the page is found.
    2: "in Rome" against "Rome": 1 of 2 and 1 of 1: 2/3; the page is not.
    """
    predictions = write(tmp_path / "p.jsonl", [guess(1, "Ada wrote it", 5), guess(2, "in Rome", 8)])
    found = score(Kilt(), predictions, write(tmp_path / "r.jsonl", GOLD)).results()
    assert found["rouge_l"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert found["kilt_rouge_l"] == pytest.approx(1 / 2 / 2)


def test_empty_missing_and_texts(tmp_path: Path) -> None:
    first = {
        "id": 1,
        "output": [{"answer": "", "provenance": [{"wikipedia_id": "5", "text": "of Ada's"}, {"url": "x"}]}],
    }
    found = score(Kilt(k=(1,)), write(tmp_path / "p.jsonl", [first]), write(tmp_path / "r.jsonl", GOLD))
    results = found.results()
    assert (results["em"], results["kilt_em"], results["r_precision"]) == (0.0, 0.0, 0.5)
    assert results["answer_recall_substring@1"] == 0.5
    assert found.notes == ("missing: 1 of 2 references have no prediction and count as wrong: 2",)


def test_gold_without_answers_or_evidence(tmp_path: Path) -> None:
    gold = [{"id": 1, "output": [{"provenance": [{"wikipedia_id": "5"}]}]}, {"id": 2, "output": [{"answer": "x"}]}]
    predictions = write(tmp_path / "p.jsonl", [guess(1, "y", 5), guess(2, "x", 5)])
    found = score(Kilt(k=(5,)), predictions, write(tmp_path / "r.jsonl", gold))
    assert found.results()["em"] == 1.0  # of the one that has an answer
    assert found.results()["r_precision"] == 0.5
    assert len(found.notes) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"id": 1, "output": []}, "field output has 0 entries"),
        ({"id": 1, "output": "Ada"}, "must be a list of objects"),
        ({"id": 1, "output": [{"answer": ["Ada"]}]}, r"\(output\[0\]\): field answer is \['Ada'\]; it must be text"),
        ({"output": [{"answer": "x"}]}, "field id is missing"),
        ({"id": 1, "output": [{"answer": "x", "provenance": [{"wikipedia_id": 1.5}]}]}, "wikipedia_id is 1.5"),
    ],
)
def test_mistakes(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(FileError, match=rf"p\.jsonl:1.*{message}"):
        score(Kilt(), write(tmp_path / "p.jsonl", [line]), write(tmp_path / "r.jsonl", GOLD))
