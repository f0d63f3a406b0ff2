"""Evaluating one run: index of its final weights, predictions of its rows, one result and its files.

All ranks of a layout call it. Predictions are kept as they come (`rag_mm.evaluate.finished`), so the same call goes on
after a kill; the files that it writes in the end are the same whatever layout answered and however often it was killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from data.command_line import dump
from data.dataset import Dataset
from data.progress import progress
from rag_mm import checkpoint
from rag_mm.evaluate import judging
from rag_mm.evaluate.answer import Answerer, Run
from rag_mm.evaluate.decoding import DecodingConfig
from rag_mm.evaluate.finished import Finished, open_finished
from rag_mm.evaluate.judging import Scored
from rag_mm.evaluate.questions import Questions, QuestionsConfig
from rag_mm.evaluate.row_scores import DEFINITIONS, INTERVAL
from rag_mm.evaluate.rows import ROWS
from rag_mm.evaluate.task_scores import OF_TOWERS, references_by_task, score_tasks
from rag_mm.evaluate.tasks.task import Task
from rag_mm.evaluate.tasks.zero_shot import ZeroShot
from rag_mm.evaluate.tower_tasks import TowerTasks
from rag_mm.launch import only_one
from retriever.index import Index, list_versions


@dataclass(frozen=True)
class Evaluated:
    """Scored predictions by row, and what they were made with (the JSON's header).

    Attributes:
        path: of the result file.
        questions: that were answered; the scored ones hold no pictures, and these read them again.
    """

    scored: dict[str, list[Scored]]
    header: dict[str, Any]
    path: Path
    questions: Questions

    @functools.cached_property
    def result(self) -> dict[str, Any]:
        """The contents of the result file."""
        rows = [judging.make_row(name, items) for name, items in self.scored.items()]
        about = {"definitions": DEFINITIONS, "intervals": INTERVAL}
        return {"rows": rows, "comparisons": judging.compare(self.scored), **about, **self.header}


def evaluate_run(
    run: Run,
    rows: Sequence[str],
    which: QuestionsConfig,
    *,
    console: Console,
    decoding: DecodingConfig | None = None,
    interrupt: Callable[[], bool] | None = None,
    tasks: Sequence[Task[Any, Any]] = (),
    built: Path | None = None,
) -> Evaluated:
    """Answer questions for every row, each with the weights of ``run`` or with none, and write the files.

    Args:
        which: questions are asked; none if there are no rows.
        decoding: by default the one that the run's configuration names.
        interrupt: asked after each batch whether to stop.
        tasks: that the answers are scored by as well (`rag_mm.evaluate.task_scores`), or the run's towers
            (`rag_mm.evaluate.tower_tasks`).
        built: folder of an index that a build job made; by default an exact one is made beside the result.

    Raises:
        ValueError: if there are no questions, or not such as ``tasks`` score, the memory is smaller than
            ``retriever.k``, ``built`` does not fit or no row retrieves, or another process evaluates this run.
        Interrupted: the same call goes on.
    """
    tower_tasks = [task for task in tasks if isinstance(task, OF_TOWERS)]
    answer_tasks = [task for task in tasks if not isinstance(task, OF_TOWERS)]
    if rows or answer_tasks:
        require_questions(run.dataset, which.split)  # before the memory is embedded, which may take hours
    asks = bool(rows or answer_tasks or any(isinstance(task, ZeroShot) for task in tower_tasks))
    questions = which.of(run.dataset) if asks else Questions.none(run.dataset.questions(which.split))
    if rows and not len(questions):
        raise ValueError(f"{questions.name} of {run.dataset.directory} has no question that is whole")
    references = references_by_task(answer_tasks, questions.words) if answer_tasks else {}
    towers = TowerTasks(run, tower_tasks, which.split, questions) if tower_tasks else None
    decoding, directory = decoding or run.config.evaluate, run.directory / "eval"
    stem = which.name if rows else f"{which.name}.towers"  # nothing that was answered is overwritten
    first = run.layout.mesh.is_first
    with only_one(directory) if first else contextlib.nullcontext():
        searches = any(ROWS[name].weights_of and ROWS[name].documents == "retrieved" for name in rows)
        if built is not None and not searches:
            raise ValueError(f"--index is {built}, but none of the rows retrieves from it")
        index = None if built is None else run.built_index(built, console=console)
        made_with = _made_with(run, which, decoding, index)
        finished = _finished(run, made_with, directory / f".{stem}.unfinished", console)
        if searches and built is None:
            index = run.index(console=console)
        answerer = Answerer(
            run.config, run.dataset, run.model, index, layout=run.layout, decoding=decoding,
            depth=which.depth,
        )  # fmt: skip
        scored = score_rows(
            run.dataset, answerer, rows, questions, depth=which.depth, console=console, finished=finished,
            interrupt=interrupt,
        )  # fmt: skip
        by_task: dict[str, Any] = {}
        if towers is not None:
            with progress(console, "embed pictures and texts", towers.num_rows, "rows") as advance:
                by_task |= towers.scored(finished.directory, directory, progress=advance, interrupt=interrupt)
        header = describe_data(run.dataset, questions, split=which.split)
        header |= {"run_dir": str(run.directory), "step": run.step, "steps": run.config.train.steps}
        header["index"] = describe_index(run, index, built)
        header |= {"k": run.config.retriever.k, "depth": which.depth}
        header["decoding"] = describe_decoding(decoding)
        header["truncated"] = _truncated(scored)
        if answer_tasks and first:
            by_task |= score_tasks(answer_tasks, references, scored, run.dataset.store)
        if tasks:
            header["tasks"] = {task.name: by_task[task.name] for task in tasks if task.name in by_task}
        evaluated = Evaluated(scored, header, directory / f"{stem}.json", questions)
        if first:
            judging.write(directory, stem, evaluated.result, scored)
            finished.remove()
        run.layout.mesh.barrier()
    return evaluated


def require_questions(dataset: Dataset, split: str) -> None:
    """ValueError if the split has no questions; it says which other split has some."""
    if len(dataset.questions(split)):
        return
    others = [other for other in ("test", "dev") if other != split and len(dataset.questions(other))]
    advice = f"; --split {others[0]} has {len(dataset.questions(others[0]))}" if others else ""
    raise ValueError(f"the {split} split of {dataset.directory} has no questions{advice}")


def score_rows(
    dataset: Dataset,
    answerer: Answerer | None,
    rows: Sequence[str],
    questions: Questions,
    *,
    depth: int,
    console: Console,
    finished: Finished | None = None,
    interrupt: Callable[[], bool] | None = None,
) -> dict[str, list[Scored]]:
    """Scored predictions by row; ``answerer`` may be None if all rows are baselines."""
    if not rows:
        return {}
    if not len(questions):
        raise ValueError(f"{questions.name} of {dataset.directory} has no question that is whole")
    seen = judging.seen_answers(dataset)
    scored = {}
    for name in rows:
        with progress(console, f"answer {name}", len(questions), "questions") as advance:
            if ROWS[name].weights_of or answerer is None:
                predictions = judging.predict(
                    name,
                    dataset,
                    answerer,
                    questions,
                    progress=advance,
                    finished=finished,
                    interrupt=interrupt,
                    depth=depth,
                )
            else:  # a baseline: once is enough
                mesh = answerer.layout.mesh
                mine = (
                    judging.predict(name, dataset, None, questions, progress=advance, depth=depth)
                    if mesh.is_first
                    else None
                )
                predictions = mesh.broadcast(mine)
        scored[name] = judging.score(questions, predictions, seen)
    return scored


def _finished(run: Run, made_with: dict[str, Any], folder: Path, console: Console) -> Finished:
    """What is done already of this very evaluation; all ranks call it."""
    mesh = run.layout.mesh
    if mesh.is_first:
        said = open_finished(folder, made_with)
        if said:
            console.print(said, highlight=False, soft_wrap=True, markup=False)
    mesh.barrier()
    return Finished(folder, writer=str(mesh.replica))


def _made_with(run: Run, which: QuestionsConfig, decoding: DecodingConfig, built: Index | None) -> dict[str, Any]:
    """Everything that decides a prediction, on the first rank."""
    config = dataclasses.replace(run.config, run_dir="", evaluate=DecodingConfig())
    return {
        "checkpoint": checkpoint_hash(run),
        "step": run.step,
        "config": hashlib.sha256(dump(config).encode()).hexdigest(),
        "data": run.dataset.fingerprint,
        "store": run.dataset.store.version,
        "decoding": describe_decoding(decoding),
        "depth": which.depth,
        "index": "exact" if built is None else dataclasses.asdict(built.manifest),
    }


def checkpoint_hash(run: Run) -> str:
    """Of the file that describes the checkpoint: step, data, resolved configuration."""
    state = checkpoint.checkpoint_dir(run.directory, run.step) / "state.json"
    return hashlib.sha256(state.read_bytes()).hexdigest()


def describe_decoding(decoding: DecodingConfig) -> dict[str, Any]:
    """What decides answers, and nothing else; a file by what is in it."""
    described: dict[str, Any] = {"decoding": decoding.decoding}
    if decoding.decoding == "beam":
        described |= {"num_beams": decoding.num_beams, "length_penalty": decoding.length_penalty}
    if decoding.decoding == "score":
        described["score_by"] = decoding.score_by
        described["candidates"] = "answers of training questions of the field"
        if decoding.candidates and Path(decoding.candidates).is_file():
            described["candidates"] = decoding.candidates
            described["candidates_sha256"] = hashlib.sha256(Path(decoding.candidates).read_bytes()).hexdigest()
    return described


def _truncated(scored: dict[str, list[Scored]]) -> dict[str, int]:
    """Texts that were cut off, over all rows."""
    counts = Counter(what for items in scored.values() for item in items for what in item.prediction.truncated)
    return dict(sorted(counts.items()))


def describe_data(dataset: Dataset, questions: Questions, *, split: str) -> dict[str, Any]:
    """What was asked, of which memory."""
    return {
        "num_questions": len(questions),
        "num_documents": len(dataset.store),
        "split": split,
        "fold": dataset.fold,
        "store_version": dataset.store.version,
        "data_fingerprint": dataset.fingerprint,
        "left_out": questions.left_out,
    }


def describe_index(run: Run, index: Index | None, built: Path | None = None) -> dict[str, Any] | None:
    """Which index answered, None if nothing was searched."""
    if index is None:
        return None
    directory, manifest = built or run.directory / "index-eval", index.manifest
    measured = {"effort": manifest.effort, "recall_at_10": manifest.recall_at_10} if manifest.factory != "Flat" else {}
    return {
        "directory": str(directory),
        "version": list_versions(directory)[-1] if built is None or index.folder is None else int(index.folder.name),
        "weights": manifest.weights,
        "num_edits": manifest.num_edits,
        "factory": manifest.factory,
        **measured,
    }
