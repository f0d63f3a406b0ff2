"""Open-domain QA from every format it reads; values by hand."""

import random
from pathlib import Path
from typing import Any

import pytest

from data.dataset import Sample
from data.document import Document
from rag_mm.evaluate.bootstrap import bootstrap, intervals
from rag_mm.evaluate.prediction import Prediction
from rag_mm.evaluate.prediction_files import FileError
from rag_mm.evaluate.tasks.captions import Captions
from rag_mm.evaluate.tasks.qa import OpenDomainQa, QaReference
from rag_mm.evaluate.tasks.task import align
from tests.rag_mm.evaluate.tasks.files import score, write

REFERENCES = [
    {"id": "a", "question": "Capital of Nepal?", "answers": ["Kathmandu"]},
    {"id": 2, "question": "Government?", "answers": ["constitutional monarchy", "monarchy"]},
]
TASK = OpenDomainQa(k=(1, 2, 5))


@pytest.fixture
def references(tmp_path: Path) -> Path:
    return write(tmp_path / "references.jsonl", REFERENCES)


def test_answers_and_recall_by_hand(tmp_path: Path, references: Path) -> None:
    predictions = [
        {"id": "2", "answer": "federal monarchy", "documents": [{"id": 1, "text": "an absolute monarchy"}]},
        {
            "id": "a",
            "answer": "The Kathmandu.",
            "documents": [{"id": 7, "text": "party of Kathmandus"}, {"id": 8, "text": "In Kathmandu, ..."}],
        },
    ]
    found = score(TASK, write(tmp_path / "p.jsonl", predictions), references)
    assert found.ids == ("a", "2")  # in the order of the references
    assert found.results() == {
        "em": 0.5,
        "f1": pytest.approx((1 + 2 / 3) / 2),  # federal monarchy / monarchy: P 1/2, R 1
        "answer_recall@1": 0.5,  # "Kathmandus" is another token
        "answer_recall@2": 1.0,
        "answer_recall@5": 1.0,
        "answer_recall_substring@1": 1.0,
        "answer_recall_substring@2": 1.0,
        "answer_recall_substring@5": 1.0,
    }
    assert found.notes == ("k=5: the longest list has 2 documents, so these count no more",)


def test_gold_documents(tmp_path: Path) -> None:
    gold = [{**REFERENCES[0], "gold_documents": ["np", "np2"]}, {**REFERENCES[1], "gold_documents": []}]
    predictions = [{"id": "a", "documents": ["x", "np2"]}, {"id": 2, "documents": ["x"]}]
    found = score(TASK, write(tmp_path / "p.jsonl", predictions), write(tmp_path / "r.jsonl", gold))
    assert found.results() == {"hit@1": 0.0, "hit@2": 1.0, "hit@5": 1.0}  # of the one question that names documents
    assert "no gold document: 1 references name none and are in no hit@k: 2" in found.notes


KILT_GOLD = [
    {
        "id": "a",
        "input": "?",
        "output": [{"answer": "Kathmandu", "provenance": [{"wikipedia_id": "7"}]}, {"answer": ""}],
    },
    {"id": "2", "input": "?", "output": [{"answer": "monarchy"}]},
]


@pytest.mark.parametrize(
    ("name", "predictions", "gold"),
    [
        ("p.jsonl", [{"id": "a", "prediction": "Kathmandu"}, {"id": "2", "prediction": "x"}], REFERENCES),
        ("p.json", {"a": "Kathmandu", "2": "x"}, REFERENCES),
        ("p.json", [{"id": "a", "prediction_text": "Kathmandu"}, {"id": "2", "prediction_text": "x"}], REFERENCES),
        ("p.jsonl", [
            {"id": "a", "output": [{"answer": "Kathmandu"}]}, {"id": 2, "output": [{"answer": "x"}]}], KILT_GOLD),
        ("p.json", {"a": "Kathmandu", "2": "x"}, {"data": [{"paragraphs": [{"context": "", "qas": [
            {"id": "a", "question": "?", "answers": [{"text": "Kathmandu", "answer_start": 0}]},
            {"id": "2", "question": "?", "answers": [{"text": "y", "answer_start": 0}]}]}]}]}),
        ("p.json", {"a": "Kathmandu", "2": "x"}, [
            {"id": "a", "answers": {"text": ["Kathmandu"], "answer_start": [0]}},
            {"id": "2", "answers": {"text": ["y"]}}]),
    ],
)  # fmt: skip
def test_formats(tmp_path: Path, name: str, predictions: Any, gold: Any) -> None:
    lines = gold in (REFERENCES, KILT_GOLD)
    found = score(TASK, write(tmp_path / name, predictions), write(tmp_path / ("r.jsonl" if lines else "r.json"), gold))
    assert found.results()["em"] == 0.5 and len(found.ids) == 2 and not found.notes


def test_dpr_results_are_joined_by_question(tmp_path: Path) -> None:
    """DPR's and FiD's files carry questions, answers and scored passages, scores as text."""
    file = [
        {"question": "q1 ", "answers": ["Rome"], "ctxs": [
            {"id": "wiki:1", "title": "Rome", "text": "no", "score": "81.5"},
            {"id": "wiki:2", "title": "", "text": "in Rome.", "score": "80.1"}]},
        {"question": "q2", "answers": ["x"], "ctxs": []},
    ]  # fmt: skip
    path = write(tmp_path / "dpr.json", file)
    found = score(TASK, path, path).results()
    assert found["answer_recall@1"] == 0.0  # the title is not searched
    assert found["answer_recall@2"] == 0.5
    assert "em" not in found


def test_own_predictions_file(tmp_path: Path) -> None:
    """The lines of this framework's runs: several rows in one file, gold answers beside the answer."""
    line = {
        "id": "q", "question": "?", "kind": "name", "gold_answers": ["x"], "gold_documents": ["d"],
        "documents": ["c", "d"], "scores": [2.5, 1.5],
    }  # fmt: skip
    rows = [{**line, "row": "joint", "answer": "X."}, {**line, "row": "pixels", "answer": None}]
    path = write(tmp_path / "p.jsonl", rows)
    found = score(OpenDomainQa(k=(1, 2), row="joint"), path, path).results()
    assert found == {"em": 1.0, "f1": 1.0, "hit@1": 0.0, "hit@2": 1.0}
    assert "em" not in score(OpenDomainQa(k=(1, 2), row="pixels"), path, path).results()
    with pytest.raises(FileError, match="occurs twice"):
        score(TASK, path, path)


def test_kinds_are_reported_apart(tmp_path: Path) -> None:
    gold = [{**REFERENCES[0], "kind": "name"}, {**REFERENCES[1], "kind": "picture"}]
    found = score(TASK, write(tmp_path / "p.json", {"a": "Kathmandu", "2": "x"}), write(tmp_path / "r.jsonl", gold))
    assert found.results() == {
        "em": 0.5, "f1": 0.5, "em[name]": 1.0, "f1[name]": 1.0, "em[picture]": 0.0, "f1[picture]": 0.0,
    }  # fmt: skip


def test_missing_and_extra_are_counted_and_named(tmp_path: Path, references: Path) -> None:
    predictions = write(tmp_path / "p.json", {"a": "Kathmandu", "x": "?", "y": "?"})
    found = score(TASK, predictions, references)
    assert found.results()["em"] == 0.5
    assert found.notes == (
        "missing: 1 of 2 references have no prediction and count as wrong: 2",
        "extra: 2 predictions have no reference and are ignored: x, y",
    )
    assert (found.context["missing"], found.context["extra"]) == (["2"], ["x", "y"])
    found = score(TASK, predictions, references, missing="leave_out")
    assert found.results()["em"] == 1.0 and found.ids == ("a",)
    assert found.notes[0] == "missing: 1 of 2 references have no prediction and are left out: 2"
    with pytest.raises(
        ValueError, match=r"1 references have no prediction \(2\) and 2 predictions no reference \(x, y\)"
    ):
        score(TASK, predictions, references, missing="refuse")


def test_a_missing_prediction_is_wrong_even_where_nothing_would_be_right(tmp_path: Path) -> None:
    gold = write(tmp_path / "r.jsonl", [{"id": 1, "answers": ["the"]}, {"id": 2, "answers": ["x"]}])
    assert score(TASK, write(tmp_path / "p.json", {"1": "", "2": "x"}), gold).results()["em"] == 1.0  # "" is "the"
    assert score(TASK, write(tmp_path / "q.json", {"2": "x"}), gold).results() == {"em": 0.5, "f1": 0.5}


def test_no_id_in_common(tmp_path: Path, references: Path) -> None:
    with pytest.raises(ValueError, match="no prediction has the id of a reference; predictions: x; references: a, 2"):
        score(TASK, write(tmp_path / "p.json", {"x": "?"}), references)


@pytest.mark.parametrize(
    ("predictions", "message"),
    [
        ([{"id": "a"}], r"p\.jsonl:1: field answer or .* is missing"),
        ([{"answer": "x"}], r"p\.jsonl:1: field question or id or .* is missing"),
        ([{"id": "a", "answer": "x"}, {"id": "a", "answer": "y"}], r"p\.jsonl:2: id 'a' occurs twice; .* line 1"),
        ([{"id": "a", "answer": 7}], r"p\.jsonl:1: field answer is 7; it must be text"),
        ([{"id": "a", "documents": "d"}], r"field documents is 'd'; it must be a list"),
        ([{"id": "a", "documents": [{"text": "x"}]}], r"p\.jsonl:1 \(documents\[0\]\): field id or"),
        (
            [{"id": "a", "documents": ["d", "e"], "scores": [1.0, 2.0]}],
            r"documents\[1\] has score 2 after 1; .* best first",
        ),
        ([{"id": "a", "documents": ["d"], "scores": []}], "list of 1 numbers"),
        ([{"id": "a", "documents": [{"id": "d", "score": "high"}]}], "field score is 'high'"),
        ([{"id": "a", "output": [{"answer": "x"}, {"answer": "y"}]}], "field output has 2 entries; .* exactly one"),
        ([{"id": "a", "answer": None}], "nothing that task qa scores"),
    ],
)
def test_mistakes_in_predictions(tmp_path: Path, references: Path, predictions: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score(TASK, write(tmp_path / "p.jsonl", predictions), references)


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        ([{"id": "a", "answers": []}], r"r\.jsonl:1: field answers is \[\]; .* at least one"),
        ([{"id": "a"}], "field gold_answers or answers or answer is missing"),
        ([{"id": "a", "output": [{"answer": " "}]}], "field output has no answer"),
        ([{"id": "a", "answers": ["x"], "gold_documents": "d"}], "must be a list of document ids"),
    ],
)
def test_mistakes_in_references(tmp_path: Path, gold: Any, message: str) -> None:
    with pytest.raises(FileError, match=message):
        score(TASK, write(tmp_path / "p.json", {"a": "x"}), write(tmp_path / "r.jsonl", gold))


def test_references_from_a_data_set_and_how_to_ask() -> None:
    samples = [
        Sample("q1", "What is it?", ("x",), "picture", "", "d", ("d",), b"png"),
        Sample("q2", "", (), "name", "", "", (), None, 0.0),
    ]
    references = TASK.references_of(samples)
    assert references == {"q1": QaReference("What is it?", ("x",), ("d",), "picture", "q1", "d")}
    question = TASK.ask("q1", references["q1"])
    assert (question.text, question.image, question.candidates) == ("What is it?", "q1", ())


def test_what_a_run_answered_is_a_prediction_file_without_a_file() -> None:
    samples = [Sample("q1", "What is it?", ("x",), "name", "", "s", ("d",))]
    predictions = [Prediction("q1", "X", ("c", "d"), (2.0, 1.0), 1)]
    task, documents = OpenDomainQa(k=(1, 2)), {"c": Document("c", "x", {}), "d": Document("d", "", {}, passage="an x")}
    found = task.score(align(task.predictions_of(predictions, documents), task.references_of(samples))).results()
    assert found == {
        "em": 1.0, "f1": 1.0, "answer_recall@1": 0.0, "answer_recall@2": 1.0, "answer_recall_substring@1": 0.0,
        "answer_recall_substring@2": 1.0, "hit@1": 0.0, "hit@2": 1.0,
    }  # fmt: skip
    with pytest.raises(ValueError, match="no question is about a picture"):
        Captions().references_of(samples)


def test_intervals_of_own_files_are_those_of_the_result_table(tmp_path: Path) -> None:
    """Questions about one subject are drawn together, with the same draws as rows of the table."""
    generator = random.Random(0)
    rows = [
        {"id": i, "subject": f"c{i * 7 % 9}", "gold_answers": ["x"], "answer": generator.choice("xy")}
        for i in range(60)
    ]
    path = write(tmp_path / "p.jsonl", rows)
    found = score(TASK, path, path)
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(str(row["subject"]), []).append(float(row["answer"] == "x"))
    value, low, high = bootstrap(groups, seed=0, draws=1000)
    assert found.results()["em"] == pytest.approx(value)
    assert intervals(found, seed=0, draws=1000)["em"] == pytest.approx((low, high))


def test_depths_are_checked() -> None:
    with pytest.raises(ValueError, match="k is 0,1"):
        OpenDomainQa(k=(0, 1))
