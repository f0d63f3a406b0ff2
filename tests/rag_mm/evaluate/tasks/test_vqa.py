"""VQA's own files end to end; values by hand from the published rules."""

from pathlib import Path
from typing import Any

import pytest

from data.dataset import Sample
from rag_mm.evaluate.prediction_files import FileError
from rag_mm.evaluate.tasks.vqa import OkVqa, Vqa
from tests.rag_mm.evaluate.tasks.files import score, write


def annotation(key: int, answers: list[str], answer_type: str = "other") -> dict[str, Any]:
    listed = [{"answer": a, "answer_confidence": "yes", "answer_id": i} for i, a in enumerate(answers, 1)]
    return {"question_id": key, "image_id": 9, "question_type": "what", "answer_type": answer_type, "answers": listed}


ANNOTATIONS = {
    "info": {}, "license": {},
    "annotations": [
        annotation(1, ["yes"] * 10, "yes/no"),
        annotation(2, ["red"] * 2 + ["dark red"] * 8),
        annotation(3, ["2"] * 3 + ["two"] * 7, "number"),
    ],
}  # fmt: skip
QUESTIONS = {"questions": [{"question_id": 2, "image_id": 9, "question": "What colour?"}]}


def test_official_files(tmp_path: Path) -> None:
    results = [
        {"question_id": 1, "answer": "Yes!"},  # normalised to "yes": 1
        {"question_id": 2, "answer": "the red"},  # "red", two of ten: .6
        {"question_id": 3, "answer": "two"},  # becomes "2", three of ten: .9
    ]
    paths = write(tmp_path / "annotations.json", ANNOTATIONS), write(tmp_path / "questions.json", QUESTIONS)
    found = score(Vqa(), write(tmp_path / "results.json", results), *paths)
    assert found.results() == pytest.approx({
        "vqa_accuracy": 2.5 / 3, "vqa_accuracy[number]": 0.9, "vqa_accuracy[other]": 0.6, "vqa_accuracy[yes/no]": 1.0,
    })  # fmt: skip
    assert found.context["variant"] == "official" and found.context["answers_per_question"] == [10]
    fork = score(Vqa(variant="both_on_disagreement"), tmp_path / "results.json", *paths).results()
    assert fork["vqa_accuracy[yes/no]"] == 0.0  # all agree, so "Yes!" stays as it is
    assert fork["vqa_accuracy[number]"] == 1.0  # all ten become 2
    asked = Vqa().ask("2", Vqa().read_references(paths)["2"])
    assert (asked.text, asked.image) == ("What colour?", "9")


def test_jsonl_missing_and_few_annotators(tmp_path: Path) -> None:
    gold = write(tmp_path / "r.jsonl", [{"id": "a", "answers": ["x", "x", "x"]}, {"id": "b", "answers": ["y"] * 10}])
    found = score(OkVqa(), write(tmp_path / "p.jsonl", [{"id": "a", "answer": "x"}]), gold)
    assert found.results() == {"vqa_accuracy": pytest.approx((2 / 3 + 0) / 2)}  # left out, two of three remain
    assert len(found.notes) == 2 and "fewer than 4 answers" in found.notes[1]


def test_references_from_a_data_set_keep_equal_answers() -> None:
    """Ten annotators said yes: ten answers, not one."""
    sample = Sample("q1", "red?", ("yes",) * 9 + ("no",), "picture", "", "", (), b"png")
    (reference,) = Vqa().references_of([sample]).values()
    assert (len(reference.answers), reference.image) == (10, "q1")
    assert Vqa().score_example("Yes", reference) == {"vqa_accuracy": 1.0}


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (
            '[{"question_id": 1, "answer": "x"},\n {"question_id": 2}]',
            r":2 \(\[1\]\): field answer or prediction is missing",
        ),
        (
            '[{"question_id": 1, "answer": "x"},\n {"question_id": 1, "answer": "y"}]',
            r":2 .*'1' occurs twice; .*line 1",
        ),
        ('[{"question_id": 1, "answer": 3}]', r":1 \(\[0\]\): field answer is 3"),
        ('{"1": "x"}', "a list of objects or a field 'results'"),
        ('[{"question_id": 1, "answer": "x"}', ":1: no valid JSON"),
    ],
)
def test_mistakes(tmp_path: Path, results: str, message: str) -> None:
    with pytest.raises(FileError, match=message):
        score(Vqa(), write(tmp_path / "results.json", results), write(tmp_path / "a.json", ANNOTATIONS))


def test_variant_is_checked() -> None:
    with pytest.raises(ValueError, match="variant is 'new'; it must be one of official, both_on_disagreement"):
        Vqa(variant="new")  # type: ignore[arg-type]
