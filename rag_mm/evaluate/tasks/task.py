"""What a task is: references, how to ask, how to score.

A task knows nothing of models. It reads references and predictions from files that people have, says what to ask about
a reference, and turns pairs of prediction and reference into a table of values (`metric.Scores`), one row an example;
intervals, paired tests and reports work on that table and are written once. One's own task is a subclass of
`ExampleTask` with four methods (docs/evaluation.md has one that runs).

Predictions are joined to references by id. A reference without prediction counts as wrong unless told otherwise, a
prediction without reference is passed over; both are counted and named, never dropped without a word.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy

from data.document import Document
from data.samples import Pair, Sample
from rag_mm.evaluate.metric import Array, Metric, Scores, mean
from rag_mm.evaluate.prediction import Prediction

R = TypeVar("R")
P = TypeVar("P")
Missing = Literal["zero", "leave_out", "refuse"]
NAMED = 5  # ids that a sentence names; all of them are in the context


@dataclass(frozen=True)
class Question:
    """What a model is shown.

    Attributes:
        text: the words, or empty where only the picture asks.
        image: the picture's name or id in the task's data, or None.
        candidates: the answers to choose from, or empty where the answer is free.
    """

    id: str
    text: str
    image: str | None = None
    candidates: tuple[str, ...] = ()


@dataclass(frozen=True)
class Aligned(Generic[P, R]):
    """Predictions beside references.

    Attributes:
        references: those that are scored, in the order of their file.
        predictions: one each, None where there is none.
        missing: ids of references without prediction, scored or not.
        extra: ids of predictions without reference.
    """

    references: Mapping[str, R]
    predictions: Mapping[str, P | None]
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    policy: Missing = "zero"

    def notes(self) -> list[str]:
        """Sentences about what does not match."""
        found = []
        if self.missing:
            total = len(self.references) + (len(self.missing) if self.policy == "leave_out" else 0)
            what = "are left out" if self.policy == "leave_out" else "count as wrong"
            count = f"{len(self.missing)} of {total} references have no prediction and {what}"
            found.append(f"missing: {count}: {named(self.missing)}")
        if self.extra:
            found.append(f"extra: {len(self.extra)} predictions have no reference and are ignored: {named(self.extra)}")
        return found

    def context(self) -> dict[str, Any]:
        return {"missing_policy": self.policy, "missing": list(self.missing), "extra": list(self.extra)}


def named(ids: Sequence[str]) -> str:
    """The first few ids for a sentence."""
    text = ", ".join(ids[:NAMED])
    return text + (f" and {len(ids) - NAMED} more" if len(ids) > NAMED else "")


def align(predictions: Mapping[str, P], references: Mapping[str, R], *, missing: Missing = "zero") -> Aligned[P, R]:
    """Join by id.

    Raises:
        ValueError: if there is nothing to score, or with ``refuse`` if an id is on one side only.
    """
    absent = tuple(key for key in references if key not in predictions)
    extra = tuple(key for key in predictions if key not in references)
    if len(absent) == len(references):
        raise ValueError(
            f"no prediction has the id of a reference; predictions: {named(extra)}; references: {named(absent)}"
        )
    if missing == "refuse" and (absent or extra):
        raise ValueError(
            f"{len(absent)} references have no prediction ({named(absent) or 'none'}) and {len(extra)} predictions no "
            f"reference ({named(extra) or 'none'}); missing is refuse"
        )
    kept = {k: r for k, r in references.items() if missing != "leave_out" or k in predictions}
    return Aligned(kept, {k: predictions.get(k) for k in kept}, absent, extra, missing)


class Task(ABC, Generic[P, R]):
    """One task. Subclasses that have options are frozen dataclasses; the command line sets their fields by name.

    Attributes:
        name: how the command line calls it.
        about: one line for the list of tasks.
        references_are, predictions_are: the formats it reads, for messages and help.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    references_are: ClassVar[str]
    predictions_are: ClassVar[str]

    @abstractmethod
    def read_references(self, paths: Sequence[Path]) -> dict[str, R]:
        """References by id, in order; several files where the source splits them.

        Raises:
            FileError: naming file, line and field.
        """

    @abstractmethod
    def read_predictions(self, path: Path) -> dict[str, P]:
        """Predictions by id."""

    @abstractmethod
    def ask(self, key: str, reference: R) -> Question:
        """What a model is asked about one reference; the reference's answer is not in it."""

    @abstractmethod
    def score(self, aligned: Aligned[P, R]) -> Scores:
        """The table of values and its metrics."""

    def references_of(self, items: Iterable[Sample | Pair]) -> dict[str, R]:
        """References from the questions or pairs of a prepared data set, those of weight 0 left out.

        Pictures of questions may be missing; their kind says whether there is one.

        Raises:
            ValueError: if the task is scored from files only.
        """
        raise ValueError(f"task {self.name} takes no references from a prepared data set; give {self.references_are}")

    def predictions_of(self, predictions: Iterable[Prediction], documents: Mapping[str, Document]) -> dict[str, P]:
        """Predictions from what a run of this framework said; those that hold nothing to score are left out.

        Args:
            documents: what was retrieved, by id.

        Raises:
            ValueError: if the task is scored from files only.
        """
        raise ValueError(f"task {self.name} takes no answers of a run; score a file with rag_mm.evaluate.score")

    def score_files(self, predictions: Path, references: Sequence[Path], *, missing: Missing = "zero") -> Scores:
        """Read, join and score."""
        return self.score(align(self.read_predictions(predictions), self.read_references(references), missing=missing))


@dataclass(frozen=True)
class ExampleTask(Task[P, R]):
    """A task whose figures are means of values of single examples."""

    definitions: ClassVar[Mapping[str, str]]

    @abstractmethod
    def score_example(self, prediction: P | None, reference: R) -> dict[str, float]:
        """Values by metric name; leave out what does not apply. None: there is no prediction."""

    def kind(self, reference: R) -> str:
        """What to report figures by besides all of them (such as the type of an answer), or empty."""
        return ""

    def unit(self, key: str, reference: R) -> str:
        """What the example is resampled with: its own id, unless it is not independent of others."""
        return key

    def definition(self, metric: str) -> str:
        """What a metric is, in words; ``recall@5`` is looked up under ``recall@k``."""
        if metric in self.definitions:
            return self.definitions[metric]
        stem, _, k = metric.partition("@")
        return self.definitions[f"{stem}@k"].replace("{k}", k)

    def reported(self, aligned: Aligned[P, R]) -> Mapping[str, bool]:
        """Stems of metrics (before ``@``) that the files say something about or not; others are reported."""
        return {}

    def context(self, aligned: Aligned[P, R]) -> dict[str, Any]:
        """More of what one must know to compare the figures."""
        return {}

    def notes(self, aligned: Aligned[P, R]) -> list[str]:
        """Sentences about what was not as it should be."""
        return []

    def score(self, aligned: Aligned[P, R]) -> Scores:
        rows = [self.score_example(aligned.predictions[key], r) for key, r in aligned.references.items()]
        reported = self.reported(aligned)
        names = list(dict.fromkeys(name for row in rows for name in row))
        names = [name for name in names if reported.get(name.partition("@")[0], True)]
        if not names:
            raise ValueError(
                f"the predictions hold nothing that task {self.name} scores; it reads {self.predictions_are}"
            )
        columns: dict[str, Array] = {name: numpy.array([row.get(name, numpy.nan) for row in rows]) for name in names}
        metrics: list[Metric] = [mean(name, self.definition(name)) for name in names]
        kinds = numpy.array([self.kind(reference) for reference in aligned.references.values()])
        for kind in sorted(set(kinds) - {""}) if len(set(kinds)) > 1 else ():
            for name in names:
                label = f"{name}[{kind}]"
                columns[label] = numpy.where(kinds == kind, columns[name], numpy.nan)
                if not numpy.isnan(columns[label]).all():
                    metrics.append(mean(label, f"{self.definition(name)}; only {kind}"))
        return Scores(
            ids=tuple(aligned.references),
            units=tuple(self.unit(key, reference) for key, reference in aligned.references.items()),
            columns=columns,
            metrics=tuple(metrics),
            context={**aligned.context(), **self.context(aligned)},
            notes=(*aligned.notes(), *self.notes(aligned)),
        )
