"""A run's answers by the rules of registered tasks: VQA accuracy, KILT-scores, nDCG, ... beside the figures of rows.

The answers are those of the run's rows, so nothing is asked again; references are the questions of the data set, which
keep what their source said (ten annotators, evidence sets, ranges). The code is that of `rag_mm.evaluate.score`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy
from rich import box
from rich.table import Table

from data.dataset import Sample
from data.document import Document
from data.document_store import DocumentStore
from rag_mm.evaluate import bootstrap
from rag_mm.evaluate.judging import Scored
from rag_mm.evaluate.metric import Scores
from rag_mm.evaluate.prediction import Prediction
from rag_mm.evaluate.rows import ROWS
from rag_mm.evaluate.tasks import registry
from rag_mm.evaluate.tasks.image_text import ImageText
from rag_mm.evaluate.tasks.task import Task, align
from rag_mm.evaluate.tasks.zero_shot import ZeroShot

OF_TOWERS = (ImageText, ZeroShot)  # of a run's towers, not of its answers
FETCHED = 1024  # documents read at once


def find_tasks(names: Iterable[str]) -> list[Task[Any, Any]]:
    """Tasks that a run's answers can be scored by, or its towers.

    Raises:
        ValueError: if there is no such task, or it is scored from files only.
    """
    found: list[Task[Any, Any]] = []
    for name in names:
        task = registry.make(name, {})
        if any(task.name == other.name for other in found):
            raise ValueError(f"--tasks names two tasks called {task.name}; give a task of your own a name of its own")
        if isinstance(task, OF_TOWERS):
            found.append(task)
            continue
        if type(task).predictions_of is Task.predictions_of or type(task).references_of is Task.references_of:
            able = [n for n, t in registry.TASKS.items() if t.predictions_of is not Task.predictions_of]
            able += [n for n, t in registry.TASKS.items() if issubclass(t, OF_TOWERS)]
            raise ValueError(
                f"--tasks names {name}, which is scored from files (python -m rag_mm.evaluate.score --task {name}); "
                f"a run is scored by: {', '.join(able)}"
            )
        found.append(task)
    return found


def references_by_task(tasks: Sequence[Task[Any, Any]], samples: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """What counts as right, by task and question.

    Raises:
        ValueError: if the questions do not hold what a task needs; says which field.
    """
    found = {}
    for task in tasks:
        try:
            found[task.name] = task.references_of(samples)
        except ValueError as error:
            raise ValueError(f"--tasks names {task.name}, but these questions are none of its: {error}") from None
    return found


def score_tasks(
    tasks: Sequence[Task[Any, Any]],
    references: Mapping[str, dict[str, Any]],
    scored: Mapping[str, Sequence[Scored]],
    store: DocumentStore,
) -> dict[str, Any]:
    """By task: definitions, and of every row that says something the task scores, its figures and notes."""
    documents = _documents(
        store, {name for items in scored.values() for s in items for name in _said(s, "").document_ids}
    )
    found: dict[str, Any] = {}
    for task in tasks:
        rows: dict[str, Any] = {}
        definitions: dict[str, str] = {}
        for row, items in scored.items():
            predictions = task.predictions_of([_said(item, row) for item in items], documents)
            if predictions:
                scores = task.score(align(predictions, references[task.name]))
                rows[row] = _row(scores)
                definitions |= {metric.name: metric.definition for metric in scores.metrics}
        found[task.name] = {"about": task.about, "rows": rows, "definitions": definitions}
    return found


def of_towers(task: Task[Any, Any], scores: Scores, *, row: str, notes: Sequence[str]) -> dict[str, Any]:
    """The same of a task that a run's towers were scored by, whose row is ``row``; ``notes`` are of the embeddings."""
    scores = dataclasses.replace(scores, notes=(*scores.notes, *notes))
    definitions = {metric.name: metric.definition for metric in scores.metrics}
    return {"about": task.about, "rows": {row: _row(scores)}, "definitions": definitions}


def task_tables(tasks: Mapping[str, Any]) -> list[Table]:
    """The same for people, a table a task."""
    tables = []
    for name, task in tasks.items():
        table = Table(title=f"{name}: {task['about']}", box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
        table.add_column("metric", no_wrap=True)
        for row in task["rows"]:
            table.add_column(row, justify="right")
        for metric in task["definitions"]:
            table.add_row(metric, *(_cell(row["figures"].get(metric)) for row in task["rows"].values()))
        tables.append(table)
    return tables


def _said(item: Scored, row: str) -> Prediction:
    """What a row said; a document that was given is no merit."""
    if row and ROWS[row].documents == "gold":
        return dataclasses.replace(item.prediction, document_ids=(), scores=())
    return item.prediction


def _row(scores: Scores) -> dict[str, Any]:
    return {"figures": _figures(scores), "notes": list(scores.notes), "context": dict(scores.context)}


def _documents(store: DocumentStore, names: set[str]) -> dict[str, Document]:
    """By id, without their pictures."""
    ids, found = sorted(names), dict[str, Document]()
    for start in range(0, len(ids), FETCHED):
        for document in store.read(ids[start : start + FETCHED], pictures=()):
            found[document.id] = dataclasses.replace(document, image=None)
    return found


def _figures(scores: Scores) -> dict[str, dict[str, Any]]:
    ends, values = bootstrap.intervals(scores), scores.results()
    found = {}
    for metric in scores.metrics:
        there = ~numpy.isnan(metric.stack(scores.columns)).all(axis=1)
        low, high = ends[metric.name]
        figure = {"value": values[metric.name], "low": low, "high": high}
        numbers = {name: None if math.isnan(value) else float(value) for name, value in figure.items()}
        found[metric.name] = {**numbers, "num": int(there.sum())}
    return found


def _cell(figure: Mapping[str, Any] | None) -> str:
    if figure is None or figure["value"] is None:
        return "–"
    return f"{figure['value']:.3f} {figure['low']:.2f}–{figure['high']:.2f}"
