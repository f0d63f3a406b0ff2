"""``python -m rag_mm.evaluate --run-dir D``: score a run, compare two, change a fact under one, or ask it something.

The run's own ``config.yaml`` says what its weights are and how answers are decoded, so ``--config`` is optional; if it
is given, it may name the run (``run_dir``), how to decode (``evaluate``) and the ranks (``parallel``), and it must not
contradict the run about data, retriever or reader. Alone, the command starts the local ranks that ``parallel`` asks
for; under ``torchrun`` it uses those it is given.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
import yaml
from rich.console import Console, RenderableType

from data import images
from data.command_line import fail, parse
from data.document_store import EDITS
from pipeline.roll_call import LostRankError, RollCall
from rag_mm import launch
from rag_mm.config import Config
from rag_mm.evaluate.answer import DEPTH, Interrupted, Run, find_checkpoint, load_run, read_config
from rag_mm.evaluate.ask import Asker, asked_table
from rag_mm.evaluate.candidates import read_candidates
from rag_mm.evaluate.compare import compare, comparison_table, read_side, runs_of
from rag_mm.evaluate.decoding import DecodingConfig
from rag_mm.evaluate.evaluation import Evaluated, evaluate_run
from rag_mm.evaluate.fact_edit import change_fact, change_table, copy_dataset, parse_fact
from rag_mm.evaluate.layout import LayoutConfig
from rag_mm.evaluate.output_files import check_output, write_output
from rag_mm.evaluate.overrides import config_file
from rag_mm.evaluate.questions import QuestionsConfig
from rag_mm.evaluate.report import write_report
from rag_mm.evaluate.rows import ROWS, check_rows, row_of
from rag_mm.evaluate.table import comparison_lines, field_table, result_table
from rag_mm.evaluate.task_scores import OF_TOWERS, find_tasks, task_tables
from rag_mm.evaluate.tasks.task import Task

DESCRIPTION = (
    "Score a run on held-out questions and write RUN/eval/test.json; or, with --set-fact, edit one "
    "document and answer with the same weights before and after; or, with --ask, answer a question of yours; or, with "
    "--compare RUN_A RUN_B, compare two runs that were evaluated, question by question."
)


@dataclass(frozen=True)
class EvaluateConfig:
    """What to evaluate.

    Attributes:
        run_dir: folder of the run, as given to train.py.
        split: test for results, dev for choices.
        step: checkpoint to take the weights from; -1: the latest.
        rows: rows of the table, comma-separated; empty: the run's own and all that need no other run; none: no question
            is asked, only the towers are scored (--tasks image_text and its like).
        num: only that many questions, chosen by a hash of their ids; 0: all.
        tasks: rules that the answers are scored by as well, comma-separated: qa, kilt, vqa, okvqa, infoseek, captions,
            retrieval, or package.module:Class; and of the towers: image_text, coco_5k, coco_1k, flickr30k_1k (by the
            pairs of the split), zero_shot (its picture questions; answers are the classes).
        depth: documents that are searched for with each question, at least 4; the reader reads retriever.k of them.
        index: folder of an index that python -m retriever.build made of this checkpoint (index.checkpoint), of any kind
            and size; empty: an exact one is made of the whole memory, once, in RUN/index-eval.
        json: copy the result there as well (of --ask and --compare: write it there); "-" prints it instead of a
            table.
        report: where the page to look at goes; empty: beside the result, as RUN/eval/test.html.
        compare: two evaluated runs, each a folder or FOLDER:ROW; --split, --num and --rows say what of them.
        set_fact: edit a document and ask about it before and after, such as "np.capital=Pokhara".
        store_copy: with --set-fact, edit a copy of the data set in this folder and leave the original alone.
        ask: answer this question instead of scoring.
        image: with --ask, a picture file that the question is about.
        evaluate: how answers are decoded; by default as the run's configuration says.
        parallel: the ranks that answer; by default one process.
    """

    run_dir: str = "runs/quickstart/joint"
    split: Literal["test", "dev"] = "test"
    step: int = -1
    rows: str = ""
    num: int = 0
    tasks: str = ""
    depth: int = DEPTH
    index: str = ""
    json: str = ""
    report: str = ""
    compare: str = ""
    set_fact: str = ""
    store_copy: str = ""
    ask: str = ""
    image: str = ""
    evaluate: DecodingConfig = field(default_factory=DecodingConfig)
    parallel: LayoutConfig = field(default_factory=LayoutConfig)

    def __post_init__(self) -> None:
        if self.num < 0:
            raise ValueError(f"--num is {self.num}; it must be 0 (all) or more")
        asked = [name for name in ("set_fact", "ask", "compare") if getattr(self, name)]
        if len(asked) > 1:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in asked)
            raise ValueError(f"{flags} are different things to do; give one of them")
        if self.depth < DEPTH:
            raise ValueError(f"--depth is {self.depth}; it must be at least {DEPTH}, because hit@{DEPTH} is reported")
        if asked and (self.tasks or self.depth != DEPTH):
            name = "tasks" if self.tasks else "depth"
            raise ValueError(f"--{name} is given, but --{asked[0].replace('_', '-')} scores no questions")
        if self.index and (self.set_fact or self.compare):
            raise ValueError(f"--index is {self.index!r}, but --{asked[0].replace('_', '-')} does not search it")
        if asked and self.report:
            raise ValueError(f"--report is {self.report!r}, but --{asked[0].replace('_', '-')} makes no report")
        if self.rows.strip() == NO_ROWS and asked:
            raise ValueError(f"--rows is none, but --{asked[0].replace('_', '-')} is about a row's answers")
        if self.rows.strip() == NO_ROWS and not self.task_names:
            raise ValueError("--rows is none, so there is nothing to do; name --tasks that score the towers")
        if self.compare:
            runs_of(self.compare)
            if len(self.row_names) > 1:
                raise ValueError(f"--rows is {self.rows!r}; --compare takes one row, or FOLDER:ROW for each run")
        if self.store_copy and not self.set_fact:
            raise ValueError(f"--store-copy is {self.store_copy!r}, but only --set-fact edits a store")
        if self.image and not self.ask:
            raise ValueError(f"--image is {self.image!r}, but there is no --ask with a question about it")
        if self.set_fact and self.parallel.num_ranks > 1:
            raise ValueError(
                "--set-fact edits and asks on one process; leave --parallel.pipeline_stages and "
                "--parallel.data_replicas (or --config) out"
            )

    @property
    def row_names(self) -> list[str]:
        if self.rows.strip() == NO_ROWS:
            return []
        return [name.strip() for name in self.rows.split(",") if name.strip()]

    @property
    def task_names(self) -> list[str]:
        return [name.strip() for name in self.tasks.split(",") if name.strip()]

    @property
    def built(self) -> Path | None:
        """Folder of the index that is given."""
        return Path(self.index) if self.index else None

    @property
    def checkpoint(self) -> int | None:
        """Step of the checkpoint; None: the latest."""
        return None if self.step < 0 else self.step


NO_ROWS = "none"
LAYOUT = tuple(f"parallel.{name}" for name in ("pipeline_stages", "data_replicas", "towers", "timeout_s"))


def main(argv: Sequence[str]) -> int:
    """Entry point; the exit status."""
    argv = _joined(argv)
    config = _parse(argv)
    first = not launch.is_rank() or os.environ["RANK"] == "0"
    try:
        for option in ("json", "report"):
            check_output(getattr(config, option), option=f"--{option}")
        if config.compare:
            _compare(config)
            return 0
        if first:
            _check_config(config_file(argv), Path(config.run_dir))
            check_rows(config.row_names, where="--rows")
            find_tasks(config.task_names)
            if config.evaluate.candidates:
                read_candidates(config.evaluate.candidates)
        if not launch.is_rank() and config.parallel.num_ranks > 1:
            find_checkpoint(Path(config.run_dir), config.checkpoint)
            return launch.launch(argv, num_ranks=config.parallel.num_ranks, module="rag_mm.evaluate")
        launch.join(timeout_s=config.parallel.timeout_s, threads=int(os.environ.get("OMP_NUM_THREADS", "1")))
        with _watched():
            _run(config)
    except (FileNotFoundError, ValueError) as error:  # the user's; every rank finds the same
        if first:
            fail(str(error))
        return launch.EXIT_USER
    except LostRankError as error:
        print(error, file=sys.stderr)
        return launch.EXIT_FAILED
    except (Interrupted, KeyboardInterrupt) as error:
        if first:
            print(str(error) or "interrupted; run the same command to go on", file=sys.stderr)
        return launch.EXIT_INTERRUPTED
    launch.leave()
    return 0


def _joined(argv: Sequence[str]) -> list[str]:
    """``--compare A B`` as ``--compare A,B``: every option has one value."""
    found = list(argv)
    if "--compare" in found:
        at = found.index("--compare")
        given = found[at + 1 : at + 3]
        if len(given) == 2 and not any(word.startswith("--") for word in given):
            found[at + 1 : at + 3] = [",".join(given)]
    return found


def _parse(argv: Sequence[str]) -> EvaluateConfig:
    """The command line; without a --config, answers are decoded as the run's own configuration says."""
    about = {"prog": "python -m rag_mm.evaluate", "description": DESCRIPTION}
    if config_file(argv):
        return parse(EvaluateConfig, argv, **about, sections=("run_dir", "evaluate", *LAYOUT))
    own = Path(_run_dir(argv)) / "config.yaml"
    if not own.exists():
        return parse(EvaluateConfig, argv, **about)
    return parse(EvaluateConfig, ["--config", str(own), *argv], **about, sections=("evaluate",))


def _run_dir(argv: Sequence[str]) -> str:
    """The folder that the flags name; whatever else they say is looked at later."""
    value = EvaluateConfig.run_dir
    for i, token in enumerate(argv):
        name, equals, given = token.partition("=")
        if name in ("--run-dir", "--run_dir"):
            value = given if equals else "".join(argv[i + 1 : i + 2])
    return value


def _watched() -> contextlib.AbstractContextManager[None]:
    """Within it, the error of a lost connection names the rank that died."""
    world = dist.group.WORLD if dist.is_initialized() else None
    return contextlib.nullcontext() if world is None else RollCall(world, what="run").names_the_dead()


def _run(config: EvaluateConfig) -> None:
    if config.set_fact:
        _set_fact(config)
    elif config.ask:
        _ask(config)
    else:
        _evaluate(config)


def _evaluate(config: EvaluateConfig) -> None:
    run = _load(config)
    tasks, which = find_tasks(config.task_names), QuestionsConfig(config.split, config.num, config.depth)
    names = _rows_of(run, config, tasks)
    first = run.layout.mesh.is_first
    with launch.Interrupt() as interrupt:
        evaluated = evaluate_run(
            run, names, which, console=Console(stderr=True, quiet=not first),
            decoding=config.evaluate, interrupt=lambda: interrupt.asked, tasks=tasks, built=config.built,
        )  # fmt: skip
    report = write_report(run, evaluated, Path(config.report) if config.report else None)
    if first:
        for line in run.dataset.store.bad.report():
            print(line, file=sys.stderr)
        _show(config, evaluated, report)


def _show(config: EvaluateConfig, evaluated: Evaluated, report: Path) -> None:
    result, path = evaluated.result, evaluated.path
    if config.json and config.json != "-":
        write_output(Path(config.json), path.read_text(encoding="utf-8"))
    if config.json == "-":
        print(json.dumps(result, ensure_ascii=False, indent=2))
        return
    console = Console()
    if result["rows"]:
        console.print(result_table(result))
        console.print(field_table(result))
    for line in comparison_lines(result):
        console.print(line)
    for table in task_tables(result.get("tasks", {})):
        console.print(table)
    for what, count in result["truncated"].items():
        console.print(f"{what}: {count} truncated")
    for what, count in result["left_out"].items():
        console.print(f"left out: {count} ({what})")
    if not result["rows"]:
        console.print(f"written: {path} and {report}", highlight=False)
        return
    console.print(f"written: {path}, {path.with_suffix('.predictions.jsonl')} and {report}", highlight=False)


def _rows_of(run: Run, config: EvaluateConfig, tasks: Sequence[Task[Any, Any]]) -> list[str]:
    """The rows to evaluate; ValueError if one of those asked for needs the weights of another run.

    Nothing if the towers alone are scored: because --rows says so, or because the split has pairs and no questions.
    """
    asked, of_towers = check_rows(config.row_names, where="--rows"), [isinstance(task, OF_TOWERS) for task in tasks]
    if config.rows.strip() == NO_ROWS:
        if not all(of_towers):
            raise ValueError(f"--rows is none, but --tasks {config.tasks} scores answers")
        return []
    if not asked and tasks and all(of_towers) and not len(run.dataset.questions(config.split)):
        return []
    own = row_of(run.config)
    possible = [name for name, row in ROWS.items() if row.weights_of in ("", own)]
    for name in asked:
        if name not in possible:
            raise ValueError(
                f"--rows names {name}, which needs a run of its own, and {run.directory} is a run of {own}; "
                "`python -m rag_mm.experiment` trains and evaluates several"
            )
    return list(asked) or [name for name in possible if not ROWS[name].on_request]


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
    console.print(f"edited: {run.dataset.directory / 'documents' / EDITS}")


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
    first = run.layout.mesh.is_first
    asker = Asker(run, decoding=config.evaluate, console=Console(stderr=True, quiet=not first), built=config.built)
    asked = asker.ask(config.ask, image=png)
    if first:
        _give(config, asked.record(), asked_table(asked))


def _compare(config: EvaluateConfig) -> None:
    task = QuestionsConfig(config.split, config.num).name
    a, b = (read_side(named, task, row=config.rows.strip()) for named in runs_of(config.compare))
    compared = compare(a, b)
    _give(config, compared, comparison_table(compared))


def _give(config: EvaluateConfig, record: Mapping[str, Any], table: RenderableType) -> None:
    """For people, or as ``--json`` says."""
    text = json.dumps(record, ensure_ascii=False, indent=2)
    if config.json == "-":
        print(text)
        return
    if config.json:
        write_output(Path(config.json), text + "\n")
    Console().print(table)


def _load(config: EvaluateConfig, *, data_dir: Path | None = None) -> Run:
    return load_run(config.run_dir, config.checkpoint, data_dir=data_dir, parallel=config.parallel)


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
