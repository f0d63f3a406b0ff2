"""Zero-shot classification: the right class among all, asked with prompt templates.

``hit@1`` is accuracy. ``mean_per_class_recall`` weighs classes alike. From scores of all classes the rank of the right
one is pessimistic about ties; from a list it is the place in the list; a single label is a list of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy

from data.samples import Pair, Sample
from rag_mm.evaluate.metric import MeanOverClasses, Scores
from rag_mm.evaluate.prediction_files import Record, by_id, is_jsonl, read_json, read_jsonl
from rag_mm.evaluate.scoring.zero_shot import TEMPLATES, prompts
from rag_mm.evaluate.tasks.qa import check_ks
from rag_mm.evaluate.tasks.task import Aligned, ExampleTask, Question

IDS = ("id", "image_id")


@dataclass(frozen=True)
class Guess:
    """What a system said of one picture.

    Attributes:
        ranked: labels, best first; as many as the file has.
        scores: of labels, instead of a list.
    """

    ranked: tuple[str, ...] = ()
    scores: dict[str, float] | None = None

    def rank(self, label: str) -> int | None:
        """Place of a label from 1, None if it is not there."""
        if self.scores is None:
            return self.ranked.index(label) + 1 if label in self.ranked else None
        if label not in self.scores:
            return None
        return sum(score >= self.scores[label] for score in self.scores.values())


@dataclass(frozen=True)
class ZeroShot(ExampleTask[Guess, str]):
    """Pictures into classes that were not trained on.

    Attributes:
        k: depths of hit.
        templates: with {} where the class name goes.
        classes: all class names; empty: those that occur in the references.
    """

    k: tuple[int, ...] = (1, 5)
    templates: tuple[str, ...] = TEMPLATES
    classes: tuple[str, ...] = ()

    name: ClassVar[str] = "zero_shot"
    about: ClassVar[str] = "zero-shot classification with prompt templates: accuracy, mean per-class recall"
    references_are: ClassVar[str] = "jsonl {id, label}"
    predictions_are: ClassVar[str] = "jsonl {id, label}, {id, ranked: [labels]} or {id, scores: {label: score}}"
    definitions: ClassVar[dict[str, str]] = {
        "hit@k": "the right class is among the first {k}",
        "mean_per_class_recall": "mean over classes of the share of their pictures whose first class is right",
    }

    def __post_init__(self) -> None:
        check_ks(self.k)
        prompts("x", self.templates)

    def read_references(self, paths: Sequence[Path]) -> dict[str, str]:
        return by_id(((r.id(*IDS), r, r.id("label")) for path in paths for r in _records(path)), what="references")

    def read_predictions(self, path: Path) -> dict[str, Guess]:
        return by_id(((r.id(*IDS), r, _guess(r)) for r in _records(path)), what="predictions")

    def references_of(self, items: Iterable[Sample | Pair]) -> dict[str, str]:
        """The first accepted answer of every question about a picture (``words`` may leave the picture out)."""
        pictured = (s for s in items if isinstance(s, Sample) and s.weight and s.kind == "picture" and s.answers)
        return {s.id: s.answers[0] for s in pictured}

    def ask(self, key: str, reference: str) -> Question:
        """The picture alone; candidates are class names, to be put into `templates`."""
        return Question(key, "", key, self.classes)

    def prompts(self) -> dict[str, list[str]]:
        """Class name to the texts that stand for it."""
        return {name: prompts(name, self.templates) for name in self.classes}

    def score_example(self, prediction: Guess | None, reference: str) -> dict[str, float]:
        rank = prediction.rank(reference) if prediction else None
        return {f"hit@{k}": float(rank is not None and rank <= k) for k in sorted({1, *self.k})}

    def score(self, aligned: Aligned[Guess, str]) -> Scores:
        scores = super().score(aligned)
        number = {label: float(i) for i, label in enumerate(dict.fromkeys(aligned.references.values()))}
        classes = numpy.array([number[label] for label in aligned.references.values()])
        name = "mean_per_class_recall"
        metric = MeanOverClasses(name, self.definitions[name], ("hit@1", "class"))
        return replace(scores, columns={**scores.columns, "class": classes}, metrics=(*scores.metrics, metric))

    def notes(self, aligned: Aligned[Guess, str]) -> list[str]:
        there = [p for p in aligned.predictions.values() if p is not None]
        shortest = min(len(p.ranked) if p.scores is None else len(p.scores) for p in there)
        deep = [k for k in self.k if k > shortest]
        return [f"k={','.join(map(str, deep))}: the shortest prediction has {shortest} labels"] if deep else []

    def context(self, aligned: Aligned[Guess, str]) -> dict[str, Any]:
        return {
            "k": list(self.k),
            "num_classes": len(set(aligned.references.values())),
            "templates": list(self.templates),
        }


def _records(path: Path) -> Iterator[Record]:
    yield from read_jsonl(path) if is_jsonl(path) else read_json(path).array("")


def _guess(record: Record) -> Guess:
    if isinstance(record.values.get("scores"), dict):
        scores = record.values["scores"]
        return Guess(scores={label: record.finite(f"scores.{label}", score) for label, score in scores.items()})
    name, value = record.get("ranked", "labels", "label", "prediction")
    labels = value if isinstance(value, list) else [value]
    ranked = tuple(record.identifier(name, label) for label in labels)
    if len(set(ranked)) < len(ranked) or not ranked:
        record.fail(f"field {name} must hold at least one label, and none twice")
    return Guess(ranked)
