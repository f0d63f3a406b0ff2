"""Evaluating one run: index of its final weights, predictions of its rows, one result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from data.dataset import Dataset
from rag_mm.evaluate import factbook
from rag_mm.evaluate.answer import Answerer, Run
from rag_mm.evaluate.factbook import Scored, TaskConfig
from rag_mm.evaluate.rows import ROWS
from retriever.index import Index, list_versions


class Advance(Protocol):
    def __call__(self, count: int) -> None: ...


@dataclass(frozen=True)
class Evaluated:
    """Scored predictions by row, and what they were made with (the JSON's header)."""

    scored: dict[str, list[Scored]]
    header: dict[str, Any]

    @property
    def result(self) -> dict[str, Any]:
        """The contents of the result file."""
        rows = [factbook.make_row(name, items) for name, items in self.scored.items()]
        return {"rows": rows, "comparisons": factbook.compare(self.scored), **self.header}


def evaluate_run(run: Run, rows: Sequence[str], task: TaskConfig, *, console: Console) -> Evaluated:
    """Answer the task's questions for every row, each with the weights of ``run`` or with none.

    Raises:
        ValueError: if there are no questions, or the memory is smaller than ``retriever.k``.
    """
    searches = any(ROWS[name].weights_of and ROWS[name].documents == "retrieved" for name in rows)
    index = run.index(console=console) if searches else None
    answerer = Answerer(run.config, run.dataset, run.model, index)
    scored = score_rows(run.dataset, answerer, rows, task, console=console)
    header = describe_data(run.dataset, task)
    header |= {"run_dir": str(run.directory), "step": run.step, "steps": run.config.train.steps}
    header["index"] = describe_index(run, index)
    header["truncated"] = dict(run.model.collator.truncated)
    return Evaluated(scored, header)


def score_rows(
    dataset: Dataset, answerer: Answerer | None, rows: Sequence[str], task: TaskConfig, *, console: Console
) -> dict[str, list[Scored]]:
    """Scored predictions by row; ``answerer`` may be None if all rows are baselines."""
    samples = task.samples(dataset)
    if not samples:
        raise ValueError(f"the {task.split} split of {dataset.directory} has no questions")
    seen = factbook.seen_answers(dataset)
    scored = {}
    for name in rows:
        with progress(console, f"answer {name}", len(samples), "questions") as advance:
            predictions = factbook.predict(name, dataset, answerer, samples, progress=advance)
        scored[name] = factbook.score(samples, predictions, seen)
    return scored


def describe_data(dataset: Dataset, task: TaskConfig) -> dict[str, Any]:
    """What was asked, of which memory."""
    questions = dataset.questions(task.split)
    return {
        "num_questions": len(task.samples(dataset)),
        "num_documents": len(dataset.store),
        "split": task.split,
        "fold": dataset.fold,
        "store_version": dataset.store.version,
        "data_fingerprint": dataset.fingerprint,
        "left_out": dict(questions.bad_samples),
    }


def describe_index(run: Run, index: Index | None) -> dict[str, Any] | None:
    """Which index answered, None if nothing was searched."""
    if index is None:
        return None
    directory = run.directory / "index-eval"
    manifest = index.manifest
    return {
        "directory": str(directory),
        "version": list_versions(directory)[-1],
        "weights": manifest.weights,
        "num_edits": manifest.num_edits,
        "factory": manifest.factory,
    }


@contextmanager
def progress(console: Console, what: str, total: int, unit: str) -> Iterator[Advance]:
    """A bar that goes away when done."""
    with Progress(
        TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
