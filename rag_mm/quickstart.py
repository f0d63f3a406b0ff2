"""The whole loop in one command: ``python -m rag_mm.quickstart``.

Data, index, training, evaluation, and then what only retrieval can do: a document is edited and the same
weights give the new answer. Each part is the command that one would type, with its time; a part that is done
already is not done again. Side rows of the table that take longer than a coffee are left to
``python -m rag_mm.experiment --config configs/factbook.yaml``, and the table says so.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from data.command_line import fail, parse
from data.dataset import Dataset
from rag_mm.evaluate import figures
from rag_mm.evaluate.answer import load_run
from rag_mm.evaluate.fact_edit import change_fact, change_table, copy_dataset, documents_text, parse_fact
from rag_mm.evaluate.overrides import config_file, index_flags
from rag_mm.evaluate.questions import QuestionsConfig
from rag_mm.evaluate.rows import USUAL_ROWS
from rag_mm.evaluate.table import comparison_lines, field_table, result_table
from rag_mm.evaluate.training_jobs import ROOT, JobsEnded
from rag_mm.experiment import Experiment, ExperimentConfig, Outcome

CONFIG = "configs/quickstart.yaml"
NUM_SHOWN = 3


@dataclass(frozen=True)
class QuickstartConfig(ExperimentConfig):
    """The configuration of `joint`, and which rows to make beside it.

    Attributes:
        run_dir: not used here; run folders lie under ``out``.
        out: folder of everything this writes.
        rows: rows of the table, comma-separated; `joint` must be one.
        folds: folds of countries, comma-separated.
        jobs: runs trained at a time.
        fact: what is edited in a copy of the data set at the end, as document.field=value.
    """

    out: str = "runs/quickstart"
    rows: str = "most_frequent,closed_book,pixels,gold_document,joint"
    folds: str = "0"
    jobs: int = 1
    fact: str = "np.capital=Pokhara"

    def __post_init__(self) -> None:
        super().__post_init__()
        if "joint" not in self.row_names:
            raise ValueError(f"--rows is {self.rows!r}; the quickstart shows what joint does, so name it too")
        if len(self.fold_numbers) != 1:
            raise ValueError(f"--folds is {self.folds!r}; the quickstart takes one, the experiment several")


class Quickstart:
    """The parts, in order.

    Attributes:
        seconds: by part.
    """

    def __init__(self, config: QuickstartConfig, *, file: str, console: Console) -> None:
        self.config, self.file, self.console = config, file, console
        self.out = Path(config.out)
        self.seconds: dict[str, float] = {}

    def run(self) -> None:
        """Raises JobsEnded with the status of a part that failed."""
        data_dir = Path(self.config.data.dir)
        with self._part("data"):
            if (data_dir / "dataset.json").exists():
                self.console.print(f"{data_dir} is there already")
            else:
                self._command("-m", "data.prepare", "factbook", "--out", str(data_dir))
        with self._part("index"):
            self.console.print(
                "by the untrained retriever; training makes its own, evaluation one of the final weights"
            )
            own = index_flags(self.config.run_config("joint", self.config.fold_numbers[0]), file=self.file)
            self._command("-m", "retriever.build", *own, "--index.dir", str(self.out / "index"))
        with self._part("training and evaluation"):
            outcome = Experiment(self.config, file=self.file, console=self.console).run()
        self._results(outcome)
        with self._part("a fact changes"):
            self._change_fact()
        with self._part("pictures"):
            self._pictures(outcome)
        self._summary(outcome)

    def _results(self, outcome: Outcome) -> None:
        self.console.rule("results", align="left")
        left_out = [name for name in USUAL_ROWS if name not in self.config.row_names]
        self.console.print(result_table(outcome.result, left_out=left_out))
        self.console.print(field_table(outcome.result))
        for line in comparison_lines(outcome.result):
            self.console.print(line)

    def _change_fact(self) -> None:
        """Edit a copy of the data set, made anew each time, and ask the trained weights before and after."""
        copy = self.out / "edited-data"
        shutil.rmtree(copy, ignore_errors=True)
        copy_dataset(Path(self.config.data.dir), copy)
        run = load_run(self._joint, data_dir=copy)
        fact = parse_fact(self.config.fact, run.dataset.store)
        change = change_fact(run, fact, index_dir=copy / "index-eval", console=self.console)
        self.console.print(change_table(change, run.dataset))

    def _pictures(self, outcome: Outcome) -> None:
        dataset = Dataset.of(dataclasses.replace(self.config.data, fold=self.config.fold_numbers[0]))
        store, questions = dataset.store, QuestionsConfig(self.config.split).of(dataset)
        chosen = figures.picture_questions(outcome.scored["joint"], NUM_SHOWN)
        pictured = questions.of([item.sample for item in chosen])
        shown = [dataclasses.replace(item, sample=s) for item, s in zip(chosen, pictured, strict=True)]
        table = Table(
            "question (picture)",
            "answer",
            "right",
            "documents read",
            title=f"{NUM_SHOWN} answered: {figures.RULE}",
        )
        for item in shown:
            answer = Text(item.prediction.answer or "", "green" if item.em else "red")
            right = Text(item.sample.answers[0])
            table.add_row(Text(item.sample.question), answer, right, Text(documents_text(item.prediction, store)))
        self.console.print(table)
        figures.curves(self._joint, self.out / "curves.png", title="joint training")
        figures.answers(shown, store, self.out / "answers.png", title=f"held-out countries; {figures.RULE}")

    @property
    def _joint(self) -> str:
        return self.config.run_config("joint", self.config.fold_numbers[0]).run_dir

    def _summary(self, outcome: Outcome) -> None:
        self.console.rule("done", align="left")
        for name, seconds in self.seconds.items():
            self.console.print(f"{seconds:7.1f} s  {name}", highlight=False)
            if name.startswith("training"):
                for part, share in outcome.seconds.items():
                    self.console.print(f"{share:7.1f} s      {part}", highlight=False, style="dim")
        self.console.print(f"{sum(self.seconds.values()):7.1f} s  in all", highlight=False, style="bold")
        joint = Path(self._joint)
        files = {
            "results": outcome.path,
            "the same as Markdown": outcome.path.with_suffix(".md"),
            "every prediction": outcome.path.with_suffix(".predictions.jsonl"),
            "loss and hit@k": self.out / "curves.png",
            "three answers": self.out / "answers.png",
            "the run (config, plan, metrics, checkpoints)": joint,
        }
        width = max(map(len, files))
        for what, path in files.items():
            self.console.print(f"{what:{width}}  {path}", highlight=False, soft_wrap=True)
        left_out = [name for name in USUAL_ROWS if name not in self.config.row_names]
        if left_out:
            self.console.print(f"rows left to configs/factbook.yaml: {', '.join(left_out)}", highlight=False)
        self.console.print(
            f'go on: python -m rag_mm.evaluate --run-dir {joint} --ask "what is the capital of Peru?"',
            highlight=False,
            soft_wrap=True,
        )

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        self.console.rule(name, align="left")
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started

    def _command(self, *arguments: str) -> None:
        """Run one of our commands in this terminal."""
        self.console.print(f"[dim]$ {escape(shlex.join(['python', *arguments]))}[/]", highlight=False, soft_wrap=True)
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        status = subprocess.run([sys.executable, *arguments], env=environment, check=False).returncode
        if status:
            raise JobsEnded(f"`python {shlex.join(arguments)}` ended with exit status {status}", max(status, 1))


def main(argv: Sequence[str]) -> int:
    """Entry point; the exit status."""
    argv = list(argv)
    if not config_file(argv):
        argv = ["--config", CONFIG, *argv]
    config = parse(
        QuickstartConfig,
        argv,
        prog="python -m rag_mm.quickstart",
        description="Data, index, joint training, evaluation and a changed fact, in one command.",
    )
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        Quickstart(config, file=config_file(argv), console=Console()).run()
    except (FileNotFoundError, ValueError) as error:
        fail(str(error))
    except JobsEnded as end:
        print(end, file=sys.stderr)
        return end.status
    except KeyboardInterrupt:
        print("interrupted; run the same command to go on", file=sys.stderr)
        return 75
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
