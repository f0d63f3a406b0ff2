"""InfoSeek: accuracy on unseen questions, on unseen entities, and their harmonic mean, which is the headline figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy

from data.document import Document
from data.samples import Pair, Sample
from rag_mm.evaluate.metric import Array, Metric, OfSums, Scores, ratio
from rag_mm.evaluate.prediction import Prediction, answers_of
from rag_mm.evaluate.prediction_files import FileError, Record, by_id, read_jsonl, shown
from rag_mm.evaluate.scoring.infoseek import Range, harmonic_mean, infoseek_score
from rag_mm.evaluate.tasks.task import Aligned, ExampleTask, Question

IDS = ("data_id", "id")
TYPES = ("time", "numerical", "string")


@dataclass(frozen=True)
class InfoSeekReference:
    """One question.

    Attributes:
        golds: accepted answers, or (low, high) of a numerical one.
        question_type: time, numerical, string, or "text" where it is not known which of time and string.
        unseen: "question" or "entity": what of it is not in the training split.
    """

    question: str
    image: str | None
    golds: tuple[str, ...] | Range
    question_type: str
    unseen: str


@dataclass(frozen=True)
class InfoSeek(ExampleTask[str, InfoSeekReference]):
    """Questions about pictures that need an encyclopedia."""

    name: ClassVar[str] = "infoseek"
    about: ClassVar[str] = "InfoSeek: unseen questions, unseen entities, harmonic mean"
    references_are: ClassVar[str] = (
        "jsonl {data_id, answer_eval, data_split, question_type}; or two files, a.jsonl,a_qtype.jsonl"
    )
    predictions_are: ClassVar[str] = "jsonl {data_id, prediction}"
    definitions: ClassVar[dict[str, str]] = {
        "correct": "exact match over answer_eval; numbers in range, ranges in it or with IoU >= 0.5",
        "unseen_question": "mean of correct over questions that are not in training, about entities that are",
        "unseen_entity": "mean of correct over questions about entities that are not in training",
        "infoseek": "harmonic mean of unseen_question and unseen_entity",
    }

    def read_references(self, paths: Sequence[Path]) -> dict[str, InfoSeekReference]:
        types: dict[str, str] = {}
        records: list[Record] = []
        for path in paths:
            for record in read_jsonl(path):
                if record.has("answer_eval"):
                    records.append(record)
                else:
                    types[record.id(*IDS)] = record.text("question_type")
        if not records:
            raise FileError(f"{', '.join(map(str, paths))}: no line has the field answer_eval")
        return by_id((_reference(record, types) for record in records), what="references")

    def read_predictions(self, path: Path) -> dict[str, str]:
        lines = ((r.id(*IDS), r, r.text("prediction", "answer")) for r in read_jsonl(path))
        return by_id(lines, what="predictions")

    def references_of(self, items: Iterable[Sample | Pair]) -> dict[str, InfoSeekReference]:
        """From questions as `data.formats.infoseek` keeps them, of whose types only numbers can be told from texts."""
        found = {}
        for s in items:
            if isinstance(s, Sample) and s.weight:
                record = Record(Path("questions"), 0, {**s.meta, "id": s.id, "question": s.question}, s.id)
                found[s.id] = _reference(record, {s.id: _type_of(record.get("answer_eval")[1])}, types_known=False)[2]
        return found

    def predictions_of(self, predictions: Iterable[Prediction], documents: Mapping[str, Document]) -> dict[str, str]:
        return answers_of(predictions)

    def ask(self, key: str, reference: InfoSeekReference) -> Question:
        return Question(key, reference.question, reference.image)

    def kind(self, reference: InfoSeekReference) -> str:
        return reference.question_type

    def score_example(self, prediction: str | None, reference: InfoSeekReference) -> dict[str, float]:
        if prediction is None:
            return {"correct": 0.0}
        numerical = reference.question_type == "numerical"
        return {"correct": infoseek_score(prediction, reference.golds, numerical=numerical)}

    def score(self, aligned: Aligned[str, InfoSeekReference]) -> Scores:
        scores = super().score(aligned)
        unseen = numpy.array([reference.unseen for reference in aligned.references.values()])
        columns = dict(scores.columns)
        for split in ("question", "entity"):
            columns[f"unseen_{split}"] = numpy.where(unseen == split, columns["correct"], numpy.nan)
        both = ("unseen_question", "unseen_entity")
        metrics: list[Metric] = [
            OfSums(name, self.definitions[name], (name,), lambda sums: ratio(sums[:, 0], sums[:, 1]))
            for name in both
            if not numpy.isnan(columns[name]).all()
        ]
        notes = scores.notes
        if len(metrics) == 2:
            metrics.insert(0, OfSums("infoseek", self.definitions["infoseek"], both, _harmonic))
        else:
            notes = (*notes, f"one split only: the references are all {metrics[0].name}, so there is no harmonic mean")
        return replace(scores, columns=columns, metrics=(*metrics, *scores.metrics), notes=notes)


def _harmonic(sums_DS: Array) -> Array:
    """Of two means; columns: two sums, two counts."""
    means = ratio(sums_DS[:, :2], sums_DS[:, 2:])
    return numpy.array([numpy.nan if numpy.isnan(row).any() else harmonic_mean(*row) for row in means])


def _type_of(answer_eval: Any) -> str:
    """Numbers have ranges."""
    entry = answer_eval[0] if isinstance(answer_eval, list) and answer_eval else answer_eval
    return "numerical" if isinstance(entry, dict) else "text"


def _reference(
    record: Record, types: Mapping[str, str], *, types_known: bool = True
) -> tuple[str, Record, InfoSeekReference]:
    key = record.id(*IDS)
    kind = (record.text("question_type") if record.has("question_type") else types.get(key, "")).lower()
    if kind not in TYPES and types_known:
        record.fail(
            f"question_type of {key} is {kind!r}; it must be one of {', '.join(TYPES)}, in this file or in the "
            "file of question types (a.jsonl,a_qtype.jsonl)"
        )
    split = record.text("data_split")
    unseen = "question" if split.endswith("unseen_question") else "entity"
    golds = _range(record) if kind == "numerical" else record.texts("answer_eval")
    question = record.text("question") if record.has("question") else ""
    image = record.id("image_id") if record.has("image_id") else None
    return key, record, InfoSeekReference(question, image, golds, kind, unseen)


def _range(record: Record) -> Range:
    """``[{"wikidata": 1.0, "range": [0.9, 1.1]}]`` as (0.9, 1.1)."""
    value = record.values["answer_eval"]
    entry = value[0] if isinstance(value, list) and value else value
    bounds = entry.get("range") if isinstance(entry, dict) else value
    if not isinstance(bounds, list) or len(bounds) < 2:
        record.fail(f'field answer_eval is {shown(value)}; a numerical question needs [{{"range": [low, high]}}]')
    low, high = (_number(record, bound) for bound in bounds[:2])
    return low, high


def _number(record: Record, value: object) -> float:
    try:
        return record.finite("answer_eval.range", float(value) if isinstance(value, str) else value)
    except ValueError:
        record.fail(f"field answer_eval.range is {shown(value)}; it must hold two finite numbers")
