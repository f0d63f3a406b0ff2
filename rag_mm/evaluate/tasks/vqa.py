"""VQA and OK-VQA: accuracy against ten annotators, by answer type too where the annotations have it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, get_args

from data.document import Document
from data.samples import Pair, Sample
from rag_mm.evaluate.prediction import Prediction, answers_of
from rag_mm.evaluate.prediction_files import Record, by_id, is_jsonl, read_json, read_jsonl
from rag_mm.evaluate.scoring.vqa import Variant, vqa_accuracy
from rag_mm.evaluate.tasks.task import Aligned, ExampleTask, Question

IDS = ("question_id", "id")


@dataclass(frozen=True)
class VqaReference:
    """A question's annotations: one answer an annotator, and the type of the answer, or empty."""

    answers: tuple[str, ...]
    question: str = ""
    image: str | None = None
    answer_type: str = ""


@dataclass(frozen=True)
class Vqa(ExampleTask[str, VqaReference]):
    """VQA accuracy.

    Attributes:
        variant: of the normalisation; see `scoring.vqa`.
    """

    variant: Variant = "official"

    name: ClassVar[str] = "vqa"
    about: ClassVar[str] = "VQA accuracy over annotators left out one at a time"
    references_are: ClassVar[str] = (
        "annotations json, with the questions json after a comma if wanted; jsonl {id, answers}"
    )
    predictions_are: ClassVar[str] = "results json [{question_id, answer}]; jsonl of the same"
    definitions: ClassVar[dict[str, str]] = {
        "vqa_accuracy": "mean over annotators left out one at a time of min(1, matches / 3)"
    }

    def __post_init__(self) -> None:
        if self.variant not in get_args(Variant):
            raise ValueError(f"variant is {self.variant!r}; it must be one of {', '.join(get_args(Variant))}")

    def read_references(self, paths: Sequence[Path]) -> dict[str, VqaReference]:
        questions: dict[str, str] = {}
        annotations: list[tuple[str, Record, VqaReference]] = []
        for path in paths:
            if is_jsonl(path):
                annotations += [_annotation(record) for record in read_jsonl(path)]
                continue
            file = read_json(path)
            if "questions" in file.records:
                questions |= by_id(
                    ((r.id(*IDS), r, r.text("question")) for r in file.records["questions"]), what="questions"
                )
            else:
                annotations += [_annotation(record) for record in file.array("annotations", "")]
        found = by_id(annotations, what="references")
        return {key: replace(r, question=questions.get(key, r.question)) for key, r in found.items()}

    def read_predictions(self, path: Path) -> dict[str, str]:
        records = read_jsonl(path) if is_jsonl(path) else iter(read_json(path).array("", "results"))
        return by_id(((r.id(*IDS), r, r.text("answer", "prediction")) for r in records), what="predictions")

    def ask(self, key: str, reference: VqaReference) -> Question:
        return Question(key, reference.question, reference.image)

    def references_of(self, items: Iterable[Sample | Pair]) -> dict[str, VqaReference]:
        """From questions: the answers of all annotators where ``meta`` has them, else the accepted answers."""
        return {s.id: _of_sample(s) for s in items if isinstance(s, Sample) and s.weight}

    def predictions_of(self, predictions: Iterable[Prediction], documents: Mapping[str, Document]) -> dict[str, str]:
        return answers_of(predictions)

    def kind(self, reference: VqaReference) -> str:
        return reference.answer_type

    def score_example(self, prediction: str | None, reference: VqaReference) -> dict[str, float]:
        if prediction is None:
            return {"vqa_accuracy": 0.0}
        return {"vqa_accuracy": vqa_accuracy(prediction, reference.answers, variant=self.variant)}

    def context(self, aligned: Aligned[str, VqaReference]) -> dict[str, Any]:
        sizes = sorted({len(reference.answers) for reference in aligned.references.values()})
        return {"variant": self.variant, "answers_per_question": sizes}

    def notes(self, aligned: Aligned[str, VqaReference]) -> list[str]:
        few = sum(len(reference.answers) < 4 for reference in aligned.references.values())
        if not few:
            return []
        return [f"few annotators: {few} questions have fewer than 4 answers, so that none can score 1"]


@dataclass(frozen=True)
class OkVqa(Vqa):
    """OK-VQA: five annotators counted twice, and VQA's accuracy."""

    name: ClassVar[str] = "okvqa"
    about: ClassVar[str] = "OK-VQA: VQA accuracy"


def _of_sample(sample: Sample) -> VqaReference:
    """`data.formats.vqa` keeps the annotation; its ``answers`` has each different answer once."""
    image = sample.id if sample.kind == "picture" else None
    if "answers" not in sample.meta:
        return VqaReference(sample.answers, sample.question, image)
    record = Record(Path("questions"), 0, {"id": sample.id, **sample.meta}, sample.id)
    return replace(_annotation(record)[2], question=sample.question, image=image)


def _annotation(record: Record) -> tuple[str, Record, VqaReference]:
    answers = record.values.get("answers")
    if isinstance(answers, list) and answers and all(isinstance(answer, dict) for answer in answers):
        given = tuple(answer.text("answer") for answer in record.objects("answers"))
    else:
        given = record.texts("answers")
    return (
        record.id(*IDS),
        record,
        VqaReference(
            given,
            record.text("question") if record.has("question") else "",
            record.id("image_id", "image") if record.has("image_id", "image") else None,
            record.text("answer_type") if record.has("answer_type") else "",
        ),
    )
