"""``python -m rag_mm.evaluate --run-dir D``: score a run, change a fact under it, or ask it something.

The run's own ``config.yaml`` says what its weights are, so ``--config`` is optional; if it is given, it may
name the run (``run_dir``), and it must not contradict the run about data, retriever or reader.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch
import yaml
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from data import images
from data.command_line import fail, parse
from data.dataset import Sample
from rag_mm.config import Config
from rag_mm.evaluate import factbook
from rag_mm.evaluate.answer import Answerer, Run, load_run, read_config
from rag_mm.evaluate.evaluation import evaluate_run
from rag_mm.evaluate.fact_edit import change_fact, change_table, copy_dataset, parse_fact
from rag_mm.evaluate.factbook import TaskConfig
from rag_mm.evaluate.overrides import config_file
from rag_mm.evaluate.rows import ROWS, check_rows, row_of
from rag_mm.evaluate.table import comparison_lines, field_table, result_table

DESCRIPTION = (
    "Score a run on held-out questions and write RUN/eval/factbook.json; or, with --set-fact, edit one "
    "document and answer with the same weights before and after; or, with --ask, answer a question of yours."
)


@dataclass(frozen=True)
class EvaluateConfig:
    """What to evaluate.

    Attributes:
        run_dir: folder of the run, as given to train.py.
        split: test for results, dev for choices.
        step: checkpoint to take the weights from; -1: the latest.
        rows: rows of the table, comma-separated; empty: the run's own and all that need no other run.
        num: only that many questions, chosen by a hash of their ids; 0: all.
        json: copy the result there as well; "-" prints it instead of the table.
        set_fact: edit a document and ask about it before and after, such as "np.capital=Pokhara".
        store_copy: with --set-fact, edit a copy of the data set in this folder and leave the original alone.
        ask: answer this question instead of scoring.
        image: with --ask, a picture file that the question is about.
    """

    run_dir: str = "runs/quickstart/joint"
    split: Literal["test", "dev"] = "test"
    step: int = -1
    rows: str = ""
    num: int = 0
    json: str = ""
    set_fact: str = ""
    store_copy: str = ""
    ask: str = ""
    image: str = ""

    def __post_init__(self) -> None:
        if self.num < 0:
            raise ValueError(f"--num is {self.num}; it must be 0 (all) or more")
        if self.set_fact and self.ask:
            raise ValueError("--set-fact and --ask are two different things to do; give one of them")
        if self.store_copy and not self.set_fact:
            raise ValueError(f"--store-copy is {self.store_copy!r}, but only --set-fact edits a store")
        if self.image and not self.ask:
            raise ValueError(f"--image is {self.image!r}, but there is no --ask with a question about it")


def main(argv: Sequence[str]) -> int:
    """Entry point; the exit status."""
    config = parse(
        EvaluateConfig, argv, prog="python -m rag_mm.evaluate", description=DESCRIPTION, sections=("run_dir",)
    )
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        _check_config(config_file(argv), Path(config.run_dir))
        if config.set_fact:
            _set_fact(config)
        elif config.ask:
            _ask(config)
        else:
            _evaluate(config)
    except (FileNotFoundError, ValueError) as error:
        fail(str(error))
    return 0


def _evaluate(config: EvaluateConfig) -> None:
    task = TaskConfig(config.split, config.num)
    names = [name.strip() for name in config.rows.split(",") if name.strip()]
    names = check_rows(names, where="--rows")
    run = _load(config)
    names = _rows_of(run, names)
    evaluated = evaluate_run(run, names, task, console=Console(stderr=True))
    result = evaluated.result
    path = factbook.write(run.directory / "eval", task.name, result, evaluated.scored)
    if config.json and config.json != "-":
        Path(config.json).parent.mkdir(parents=True, exist_ok=True)
        Path(config.json).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    if config.json == "-":
        print(json.dumps(result, ensure_ascii=False, indent=2))
        return
    console = Console()
    console.print(result_table(result))
    console.print(field_table(result))
    for line in comparison_lines(result):
        console.print(line)
    for what, count in (*result["truncated"].items(), *result["left_out"].items()):
        if count:
            console.print(
                f"{what}: {count} truncated" if what in result["truncated"] else f"left out: {count} ({what})"
            )
    console.print(f"written: {path} and {path.with_suffix('.predictions.jsonl')}")


def _rows_of(run: Run, asked: Sequence[str]) -> list[str]:
    """The rows to evaluate; ValueError if one of those asked for needs the weights of another run."""
    own = row_of(run.config)
    possible = [name for name, row in ROWS.items() if row.weights_of in ("", own)]
    for name in asked:
        if name not in possible:
            raise ValueError(
                f"--rows names {name}, which needs a run of its own, and {run.directory} is a run of {own}; "
                "`python -m rag_mm.experiment` trains and evaluates several"
            )
    return list(asked) or possible


def _set_fact(config: EvaluateConfig) -> None:
    data_dir = None
    if config.store_copy:
        data_dir = Path(config.store_copy)
        copy_dataset(Path(_run_config(config).data.dir), data_dir)
    run = _load(config, data_dir=data_dir)
    fact = parse_fact(config.set_fact, run.dataset.store)
    index_dir = data_dir / "index-eval" if data_dir else run.directory / "index-eval"
    change = change_fact(run, fact, index_dir=index_dir, console=Console(stderr=True))
    console = Console()
    console.print(change_table(change, run.dataset))
    console.print(f"edited: {run.dataset.store.directory / 'edits.jsonl'}")


def _ask(config: EvaluateConfig) -> None:
    png = None
    if config.image:
        try:
            png = Path(config.image).read_bytes()
            images.load_rgba(png)
        except FileNotFoundError:
            raise FileNotFoundError(f"--image is {config.image}, which does not exist") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"--image is {config.image}, which cannot be read: {error}") from None
    run = _load(config)
    kind: Literal["name", "picture"] = "picture" if png else "name"
    sample = Sample("asked", config.ask, ("",), kind, "", "", (), png)
    row = ROWS[row_of(run.config)]
    index = run.index(console=Console(stderr=True)) if row.documents == "retrieved" else None
    (prediction,) = Answerer(run.config, run.dataset, run.model, index).answer([sample], row.documents)
    table = Table(
        title=Text(prediction.answer or "(no answer)", "bold green"),
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    for column in ("document", "score", "read", "text"):
        table.add_column(column, justify="right" if column == "score" else "left")
    documents = run.dataset.store.fetch(prediction.document_ids)
    for rank, (document, score) in enumerate(zip(documents, prediction.scores, strict=True)):
        text = "; ".join(f"{label}: {value}" for label, value in document.fields.items())
        read = "yes" if rank < prediction.num_read else ""
        table.add_row(Text(document.title), f"{score:.2f}", read, Text(text))
    console = Console()
    console.print(Text(config.ask))
    console.print(table)


def _load(config: EvaluateConfig, *, data_dir: Path | None = None) -> Run:
    return load_run(config.run_dir, None if config.step < 0 else config.step, data_dir=data_dir)


def _run_config(config: EvaluateConfig) -> Config:
    """The run's resolved configuration; says which command trains if there is no run."""
    if not (Path(config.run_dir) / "config.yaml").exists():
        load_run(config.run_dir)  # raises, with the command
    return read_config(Path(config.run_dir))


def _check_config(path: str, run_dir: Path) -> None:
    """Refuse a --config that contradicts the run about what the weights mean."""
    if not path or not (run_dir / "config.yaml").exists():
        return
    parse(Config, ["--config", path], prog="", description="", sections=[field.name for field in fields(Config)])
    contents = yaml.safe_load(Path(path).read_text()) or {}
    trained = read_config(run_dir)
    for section in ("data", "retriever", "reader"):
        for name, here in (contents.get(section) or {}).items():
            there = getattr(getattr(trained, section), name)
            if here != there and f"{section}.{name}" not in ("data.fold", "data.dir"):
                raise ValueError(
                    f"{section}.{name} is {here} in {path}, but {run_dir} was trained with {there}; "
                    "leave --config out to evaluate it as it was trained"
                )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
