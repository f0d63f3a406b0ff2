"""InfoSeek's files end to end; values by hand from the published rules."""

from pathlib import Path

import numpy
import pytest

from rag_mm.evaluate.bootstrap import intervals
from rag_mm.evaluate.prediction_files import FileError
from rag_mm.evaluate.tasks.infoseek import InfoSeek
from tests.rag_mm.evaluate.tasks.files import score, write

GOLD = [
    {
        "data_id": "q1",
        "image_id": "oven_1",
        "question": "?",
        "answer_eval": ["Alps"],
        "data_split": "val_unseen_question",
    },
    {"data_id": "q2", "answer_eval": ["1995", "May 1995"], "data_split": "val_unseen_question"},
    {"data_id": "e1", "answer_eval": [{"wikidata": 10, "range": [9, 11]}], "data_split": "val_unseen_entity"},
    {"data_id": "e2", "answer_eval": {"wikidata": 1, "range": ["0.9", "1.1"]}, "data_split": "val_unseen_entity"},
    {"data_id": "e3", "answer_eval": ["x"], "data_split": "val_unseen_entity"},
]
TYPES = [{"data_id": key, "question_type": kind} for key, kind in
         (("q1", "String"), ("q2", "Time"), ("e1", "Numerical"), ("e2", "Numerical"), ("e3", "String"))]  # fmt: skip
ANSWERS = {"q1": "the Alps", "q2": "1996", "e1": "about 10 km", "e2": "2 to 3", "e3": "y"}


def test_scores_by_hand(tmp_path: Path) -> None:
    """Unseen questions: 1 of 2. Unseen entities: 1 of 3. Harmonic mean: 2 * (1/2 * 1/3) / (5/6) = .4"""
    predictions = write(tmp_path / "p.jsonl", [{"data_id": k, "prediction": v} for k, v in ANSWERS.items()])
    paths = write(tmp_path / "r.jsonl", GOLD), write(tmp_path / "t.jsonl", TYPES)
    found = score(InfoSeek(), predictions, *paths)
    assert found.results() == pytest.approx({
        "infoseek": 0.4, "unseen_question": 1 / 2, "unseen_entity": 1 / 3, "correct": 2 / 5,
        "correct[numerical]": 1 / 2, "correct[string]": 1 / 2, "correct[time]": 0.0,
    })  # fmt: skip
    low, high = intervals(found, draws=300)["infoseek"]
    assert 0 <= low < 0.4 < high <= 1
    assert InfoSeek().ask("q1", InfoSeek().read_references(paths)["q1"]).image == "oven_1"


def test_one_split_has_no_harmonic_mean(tmp_path: Path) -> None:
    gold = [{**GOLD[0], "question_type": "string"}]
    found = score(
        InfoSeek(),
        write(tmp_path / "p.jsonl", [{"data_id": "q1", "prediction": "Alps"}]),
        write(tmp_path / "r.jsonl", gold),
    )
    assert found.results() == {"unseen_question": 1.0, "correct": 1.0}
    assert "one split only" in found.notes[0]


def test_missing_count_as_wrong(tmp_path: Path) -> None:
    predictions = write(tmp_path / "p.jsonl", [{"data_id": "q1", "prediction": "Alps"}])
    found = score(InfoSeek(), predictions, write(tmp_path / "r.jsonl", GOLD), write(tmp_path / "t.jsonl", TYPES))
    assert found.results()["unseen_question"] == 0.5
    assert found.results()["infoseek"] == pytest.approx(0, abs=1e-9)
    assert numpy.isfinite(found.columns["correct"]).all()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({**GOLD[0]}, "question_type of q1 is ''; it must be one of time, numerical, string"),
        ({**GOLD[0], "question_type": "colour"}, "question_type of q1 is 'colour'"),
        ({**GOLD[0], "question_type": "numerical"}, "a numerical question needs"),
        ({"data_id": "x", "question_type": "time"}, "no line has the field answer_eval"),
        ({**GOLD[2], "question_type": "numerical", "answer_eval": [{"range": [1, "x"]}]}, "two finite numbers"),
        ({"data_id": "q", "answer_eval": ["x"], "question_type": "time"}, "field data_split is missing"),
    ],
)
def test_mistakes(tmp_path: Path, line: dict, message: str) -> None:
    predictions = write(tmp_path / "p.jsonl", [{"data_id": "q1", "prediction": "x"}])
    with pytest.raises(FileError, match=message):
        score(InfoSeek(), predictions, write(tmp_path / "r.jsonl", [line]))
