"""Every row of the result table, trained and compared: ``python -m rag_mm.experiment --config C --out D``.

For each fold and each row that needs weights of its own, one run of ``train.py`` (run folders
``D/<row>``, or ``D/fold-<f>/<row>`` with several folds); each is evaluated on its fold's test countries as
soon as it is done. The folds' predictions are then pooled: every country is held out once, so the table
speaks about all of them, and the comparisons pair the rows question by question. Started again, it resumes.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from data.command_line import fail, parse
from data.dataset import Dataset
from rag_mm.config import Config
from rag_mm.evaluate import judging
from rag_mm.evaluate.answer import load_run
from rag_mm.evaluate.evaluation import describe_data, evaluate_run, score_rows
from rag_mm.evaluate.judging import Scored
from rag_mm.evaluate.overrides import config_file, flags, replaced
from rag_mm.evaluate.questions import QuestionsConfig
from rag_mm.evaluate.report import write_report
from rag_mm.evaluate.row_scores import DEFINITIONS, INTERVAL
from rag_mm.evaluate.rows import ROWS, USUAL_ROWS, check_rows, runs_needed
from rag_mm.evaluate.table import comparison_lines, field_table, markdown, result_table
from rag_mm.evaluate.training_jobs import Job, JobsEnded, run_jobs


@dataclass(frozen=True)
class ExperimentConfig(Config):
    """The configuration of `joint`, from which every row departs, and which rows to make.

    Attributes:
        run_dir: not used here; run folders lie under ``out``.
        data: the data set; ``data.fold`` is set by ``folds``.
        out: folder of everything this writes.
        rows: rows of the table, comma-separated.
        folds: folds of countries, comma-separated; each holds other countries out.
        jobs: runs trained at a time.
        split: test for results, dev for choices.
    """

    out: str = "runs/factbook"
    rows: str = ",".join(USUAL_ROWS)
    folds: str = "0,1,2,3"
    jobs: int = 2
    split: Literal["test", "dev"] = "test"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.jobs < 1:
            raise ValueError(f"--jobs is {self.jobs}; it must be at least 1")
        if not self.row_names:
            raise ValueError("--rows is empty; name at least one row, or leave it out for all")
        if not self.fold_numbers:
            raise ValueError("--folds is empty; name at least one fold, such as 0")

    @property
    def row_names(self) -> list[str]:
        """The rows in the table's order."""
        return check_rows((name.strip() for name in self.rows.split(",") if name.strip()), where="--rows")

    @property
    def fold_numbers(self) -> list[int]:
        """The folds, ascending."""
        parts = [part.strip() for part in self.folds.split(",") if part.strip()]
        if not all(part in ("0", "1", "2", "3") for part in parts):
            raise ValueError(f"--folds is {self.folds!r}; it must be numbers from 0 to 3, comma-separated")
        return sorted({int(part) for part in parts})

    def run_config(self, row: str, fold: int) -> Config:
        """What train.py is told for one row and fold."""
        base = Config(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Config)})
        overrides = ROWS[row].overrides
        assert overrides is not None, f"{row} is not trained"
        folder = Path(self.out) / (f"fold-{fold}" if len(self.fold_numbers) > 1 else "") / row
        return replaced(base, {**overrides(base), "data.fold": fold, "run_dir": str(folder)})


@dataclass
class Outcome:
    """What an experiment made.

    Attributes:
        result: the contents of ``eval/test.json``.
        scored: pooled predictions by row.
        seconds: by part, such as "train joint".
    """

    result: dict[str, Any]
    scored: dict[str, list[Scored]]
    path: Path
    seconds: dict[str, float] = field(default_factory=dict)


class Experiment:
    """Trains, evaluates and pools.

    Args:
        file: the YAML file that the runs are started with, or "".
    """

    def __init__(self, config: ExperimentConfig, *, file: str, console: Console) -> None:
        self.config, self.file, self.console = config, file, console
        self.which = QuestionsConfig(config.split)
        self.scored: dict[tuple[str, int], list[Scored]] = {}
        self.headers: dict[tuple[str, int], dict[str, Any]] = {}
        self.seconds: dict[str, float] = {}

    def jobs(self) -> list[Job]:
        """The runs that are needed, fold by fold."""
        base = parse(Config, ["--config", self.file] if self.file else [], prog="", description="")
        found = []
        for fold in self.config.fold_numbers:
            for row in runs_needed(self.config.row_names):
                config = self.config.run_config(row, fold)
                own = ["--config", self.file] if self.file else []
                run_flags = [*own, *flags(config, base)]
                found.append(Job(self._label(row, fold), Path(config.run_dir), tuple(run_flags), config.train.steps))
        return found

    def run(self) -> Outcome:
        """Do everything that is left to do.

        Raises:
            JobsEnded: if a run failed or was interrupted.
            FileNotFoundError, ValueError: if data or configuration do not fit.
        """
        quiet = Console(stderr=True, quiet=True)
        console = self.console if self.config.jobs == 1 else quiet
        for fold in self.config.fold_numbers:  # first, since it needs no training and finds missing data at once
            dataset = Dataset.of(dataclasses.replace(self.config.data, fold=fold))
            names = [name for name in self.config.row_names if not ROWS[name].weights_of]
            for name, items in score_rows(
                dataset, None, names, self.which.of(dataset), depth=self.which.depth, console=console
            ).items():
                self.scored[name, fold] = items
        jobs = self.jobs()
        place = {
            job.name: (row, fold)
            for job, (fold, row) in zip(
                jobs,
                [(f, r) for f in self.config.fold_numbers for r in runs_needed(self.config.row_names)],
                strict=True,
            )
        }

        def done(job: Job, seconds: float) -> None:
            row, fold = place[job.name]
            self._add("train", row, seconds)
            started = time.perf_counter()
            names = [name for name in self.config.row_names if ROWS[name].weights_of == row]
            run = load_run(job.run_dir)
            evaluated = evaluate_run(run, names, self.which, console=console)
            write_report(run, evaluated)
            for name, items in evaluated.scored.items():
                self.scored[name, fold] = items
            self.headers[row, fold] = evaluated.header
            self._add("evaluate", row, time.perf_counter() - started)
            if self.config.jobs > 1:
                em = [f"{name} EM {judging.make_row(name, evaluated.scored[name])['em']:.3f}" for name in names]
                self.console.print(f"{job.name}: evaluated, {', '.join(em)}", highlight=False)

        run_jobs(jobs, at_once=self.config.jobs, console=self.console, done=done)
        return self._pool()

    def _pool(self) -> Outcome:
        """One table over all folds."""
        folds, names = self.config.fold_numbers, self.config.row_names
        scored = {name: [item for fold in folds for item in self.scored[name, fold]] for name in names}
        described = [
            describe_data(dataset, self.which.of(dataset), split=self.which.split)
            for dataset in (Dataset.of(dataclasses.replace(self.config.data, fold=fold)) for fold in folds)
        ]
        result: dict[str, Any] = {
            "rows": [judging.make_row(name, items) for name, items in scored.items()],
            "comparisons": judging.compare(scored),
            "definitions": DEFINITIONS,
            "intervals": INTERVAL,
            **described[0],
            "k": self.config.run_config("joint", folds[0]).retriever.k,
            "num_questions": sum(part["num_questions"] for part in described),
            "fold": folds[0] if len(folds) == 1 else folds,
            "index": self._joint_header(folds[0], "index"),
            "runs": {
                self._label(row, fold): {key: header[key] for key in ("run_dir", "step", "steps", "index", "truncated")}
                for (row, fold), header in self.headers.items()
            },
            "seconds": {name: round(value, 1) for name, value in self.seconds.items()},
        }
        if len(folds) > 1:
            result["rows_by_fold"] = {
                str(fold): [judging.make_row(name, self.scored[name, fold]) for name in names] for fold in folds
            }
        directory = Path(self.config.out) / "eval"
        path = judging.write(directory, self.which.name, result, scored)
        (directory / f"{self.which.name}.md").write_text(markdown(result), encoding="utf-8")
        return Outcome(result, scored, path, self.seconds)

    def _joint_header(self, fold: int, key: str) -> Any:
        """What the headline row's run says; null where it was not trained."""
        return self.headers.get(("joint", fold), {}).get(key)

    def _label(self, row: str, fold: int) -> str:
        return f"{row} fold {fold}" if len(self.config.fold_numbers) > 1 else row

    def _add(self, what: str, row: str, seconds: float) -> None:
        name = f"{what} {row}"
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def main(argv: Sequence[str]) -> int:
    """Entry point; the exit status."""
    config = parse(
        ExperimentConfig,
        argv,
        prog="python -m rag_mm.experiment",
        description="Train and compare rows of the result table over folds of countries. Safe to repeat.",
    )
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    console = Console()
    started = time.perf_counter()
    try:
        outcome = Experiment(config, file=config_file(argv), console=console).run()
    except (FileNotFoundError, ValueError) as error:
        fail(str(error))
    except JobsEnded as end:
        print(end, file=sys.stderr)
        return end.status
    console.print(result_table(outcome.result, left_out=[name for name in USUAL_ROWS if name not in config.row_names]))
    console.print(field_table(outcome.result))
    for line in comparison_lines(outcome.result):
        console.print(line)
    seconds = time.perf_counter() - started
    console.print(f"written: {outcome.path}, .md and .predictions.jsonl beside it, in {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
