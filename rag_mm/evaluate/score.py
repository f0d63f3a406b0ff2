"""``python -m rag_mm.evaluate.score --task T --predictions P --references R``: scores of any system's predictions.

No model and no data set is needed, only files. ``--json -`` prints one JSON object of metric name to fraction of 1
(ranks are ranks); what does not match between the files is said on stderr and, with ``--full``, in the object. Exit
status 2 names file, line and field of what is wrong.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table

from data.command_line import fail, parse
from rag_mm.evaluate import bootstrap
from rag_mm.evaluate.bootstrap import Difference
from rag_mm.evaluate.metric import Scores
from rag_mm.evaluate.output_files import check_output, write_output
from rag_mm.evaluate.tasks import registry
from rag_mm.evaluate.tasks.task import Missing, Task

DESCRIPTION = "Score a prediction file against references, by the rules of the task's field."


@dataclass(frozen=True)
class ScoreConfig:
    """What to score. An option that the task does not have is refused.

    Attributes:
        task: name of the task, or package.module:Class; "list" lists them with the files they read.
        predictions: the system's file.
        references: the gold file, or several separated by commas where the source splits them.
        json: print the result as JSON ("-") or write it to this file; empty: a table.
        compare: a second system's predictions for the same references; differences are the first minus this one.
        intervals: add 95 % bootstrap intervals.
        full: add to the JSON what each figure means and was made from.
        per_example: write one JSON line an example, with its values, to this file.
        missing: what becomes of references without a prediction. zero: they count as wrong; leave_out: they are left
            out; refuse: any id that is on one side only is an error.
        draws: resamplings of intervals and tests.
        seed: of the resamplings.
        k: depths, such as 1,5,20.
        row: of a file with several systems' lines, those with this "row".
        variant: of VQA's normalisation, official or both_on_disagreement.
        tokenizer: of captions: ptb_like, ptb (needs Java) or whitespace.
        ties: of image-text ranks: pessimistic or by_order.
        split: of Karpathy's files, such as test.
    """

    task: str = ""
    predictions: str = ""
    references: str = ""
    json: str = ""
    compare: str = ""
    intervals: bool = False
    full: bool = False
    per_example: str = ""
    missing: Literal["zero", "leave_out", "refuse"] = "zero"
    draws: int = bootstrap.DRAWS
    seed: int = 0
    k: str = ""
    row: str = ""
    variant: str = ""
    tokenizer: str = ""
    ties: str = ""
    split: str = ""

    def __post_init__(self) -> None:
        if not self.task:
            raise ValueError(
                f"--task is not set; it must be one of {', '.join(registry.TASKS)}, or package.module:Class"
            )
        if self.task != "list":
            for name in ("predictions", "references"):
                if not getattr(self, name):
                    raise ValueError(f"--{name} is not set; it must be a file")
        if self.full and not self.json:
            raise ValueError("--full adds to the JSON; say where that goes with --json")
        if self.draws < 100:
            raise ValueError(f"--draws is {self.draws}; it must be at least 100")

    def reference_paths(self) -> list[Path]:
        """The reference files; a name that is a file is one, commas and all."""
        if Path(self.references).exists():
            return [Path(self.references)]
        return [Path(path) for path in self.references.split(",") if path]

    def options(self) -> dict[str, Any]:
        """What is set of the options that belong to tasks."""
        names = ("row", "variant", "tokenizer", "ties", "split")
        options: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name)}
        if self.k:
            try:
                options["k"] = tuple(int(k) for k in self.k.split(","))
            except ValueError:
                raise ValueError(f"--k is {self.k!r}; it must be whole numbers from 1, such as 1,5,20") from None
        return options


def main(argv: Sequence[str]) -> int:
    """Entry point; the exit status."""
    config = parse(ScoreConfig, argv, prog="python -m rag_mm.evaluate.score", description=DESCRIPTION)
    if config.task == "list":
        Console().print(task_table())
        return 0
    try:
        for option in ("json", "per_example"):
            check_output(getattr(config, option), option=f"--{option}")
        task = registry.make(config.task, config.options())
        scores = _score(config, task, config.predictions)
        other = _score(config, task, config.compare) if config.compare else None
        found = result(
            scores,
            other,
            intervals=config.intervals,
            context=_context(config, task, scores) if config.full else None,
            draws=config.draws,
            seed=config.seed,
        )
        if config.per_example:
            write_output(Path(config.per_example), "".join(f"{json.dumps(line)}\n" for line in example_lines(scores)))
        text = json.dumps(found, ensure_ascii=False, indent=2)
        if config.json not in ("", "-"):
            write_output(Path(config.json), text + "\n")
    except (FileNotFoundError, ValueError) as error:
        fail(str(error))
    if config.json == "-":
        print(text)
    elif not config.json:
        Console().print(result_table(found, title=f"{config.task}: {len(scores.ids)} examples of {config.references}"))
    return 0


def result(
    scores: Scores,
    other: Scores | None = None,
    *,
    intervals: bool = False,
    context: Mapping[str, Any] | None = None,
    draws: int = bootstrap.DRAWS,
    seed: int = 0,
) -> dict[str, Any]:
    """The JSON object: metric to figure, and under ``intervals``, ``comparison`` and ``context`` what was asked for.

    A figure that nothing is left to compute from is null.
    """
    found: dict[str, Any] = {name: _number(value) for name, value in scores.results().items()}
    found |= {short: found[name] for short, name in scores.aliases.items()}
    if intervals:
        ends = bootstrap.intervals(scores, seed=seed, draws=draws)
        found["intervals"] = {name: [_number(low), _number(high)] for name, (low, high) in ends.items()}
    if other is not None:
        differences = bootstrap.compare(scores, other, seed=seed, draws=draws)
        others = other.results()
        found["comparison"] = {name: _comparison(others[name], d) for name, d in differences.items()}
    if context is not None:
        found["context"] = dict(context)
    return found


def example_lines(scores: Scores) -> list[dict[str, Any]]:
    """One object an example: id, and every value that applies to it."""
    return [
        {"id": key, **{name: float(c[i]) for name, c in scores.columns.items() if not math.isnan(c[i])}}
        for i, key in enumerate(scores.ids)
    ]


def result_table(found: Mapping[str, Any], *, title: str) -> Table:
    """The same for people."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    intervals, comparison = found.get("intervals"), found.get("comparison")
    table.add_column("metric")
    table.add_column("value", justify="right")
    if intervals:
        table.add_column("95 %", justify="right")
    for name in ("other", "difference", "95 %", "p") if comparison else ():
        table.add_column(name, justify="right")
    for name, value in found.items():
        if isinstance(value, Mapping):
            continue
        row = [name, _shown(value)]
        if intervals:
            row.append("–".join(_shown(end) for end in intervals[name]) if name in intervals else "")
        if comparison and name in comparison:
            c = comparison[name]
            row += [
                _shown(c["other"]),
                f"{c['difference']:+.4f}",
                f"{c['low']:+.4f} to {c['high']:+.4f}",
                f"{c['p']:.4f}",
            ]
        table.add_row(*row)
    return table


def task_table() -> Table:
    """All tasks with the files they read."""
    table = Table(box=box.SIMPLE_HEAD, show_lines=True)
    for column in ("task", "what", "references", "predictions"):
        table.add_column(column)
    for name, task in registry.TASKS.items():
        table.add_row(name, task.about, task.references_are, task.predictions_are)
    return table


def _score(config: ScoreConfig, task: Task[Any, Any], predictions: str) -> Scores:
    missing: Missing = config.missing
    scores = task.score_files(Path(predictions), config.reference_paths(), missing=missing)
    for note in scores.notes:
        print(f"{predictions}: {note}" if config.compare else note, file=sys.stderr)
    return scores


def _context(config: ScoreConfig, task: Task[Any, Any], scores: Scores) -> dict[str, Any]:
    return {
        "task": config.task,
        "predictions": config.predictions,
        "references": [str(path) for path in config.reference_paths()],
        "sha256": {str(path): _sha256(path) for path in (Path(config.predictions), *config.reference_paths())},
        "num_examples": len(scores.ids),
        "num_units": len(set(scores.units)),
        "definitions": {metric.name: metric.definition for metric in scores.metrics},
        "aliases": dict(scores.aliases),
        "interval": f"percentile bootstrap over units, 95 %, {config.draws} draws, seed {config.seed}",
        "test": f"randomisation by swapping a unit's two results, two-sided, {config.draws} draws, seed {config.seed}",
        "compared_with": config.compare or None,
        "notes": list(scores.notes),
        **scores.context,
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _comparison(other: float, difference: Difference) -> dict[str, Any]:
    return {"other": _number(other), **{key: _number(value) for key, value in asdict(difference).items()}}


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _shown(value: Any) -> str:
    return "–" if value is None else f"{value:.4f}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
