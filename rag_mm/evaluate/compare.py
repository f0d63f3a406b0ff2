"""Two runs that were evaluated, question by question: ``python -m rag_mm.evaluate --compare RUN_A RUN_B``.

Nothing is answered again: the predictions files are read. The two must have answered the same questions; what else
differs between them (memory, index, k, decoding, seed, ...) is listed, because it is what the difference may come from.
For every figure that both have: both values, the difference with its paired bootstrap interval (both see the same
resampled subjects), and the p-value of a randomisation test (`rag_mm.evaluate.bootstrap` says which).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rag_mm.evaluate import bootstrap
from rag_mm.evaluate.metric import Scores
from rag_mm.evaluate.row_scores import DEFINITIONS, INTERVAL, scores_of
from rag_mm.evaluate.rows import check_rows, row_of
from rag_mm.evaluate.run import read_config

TEST = "randomisation test over subjects, two-sided, 10,000 draws, seed 0; intervals: paired, " + INTERVAL
CONTEXT = ("split", "fold", "num_documents", "store_version", "data_fingerprint", "k", "step", "decoding", "index")
SHOWN = 6  # ids named of those on one side only


@dataclass(frozen=True)
class Side:
    """An evaluated row of a run.

    Attributes:
        context: what its result file says of how it was made.
    """

    run_dir: str
    row: str
    scores: Scores
    context: dict[str, Any]


def read_side(named: str, stem: str, *, row: str = "") -> Side:
    """An evaluated run.

    Args:
        named: its folder, or ``FOLDER:ROW``.
        stem: of the result files.
        row: where ``named`` has none; by default the run's own.

    Raises:
        FileNotFoundError, ValueError: if it was not evaluated, or not on this row; says which command does it.
    """
    folder, _, own = named.rpartition(":")
    if not folder or Path(named).is_dir():
        folder, own = named, row
    directory = Path(folder)
    result_file, lines_file = (directory / "eval" / f"{stem}{end}" for end in (".json", ".predictions.jsonl"))
    for path in (directory / "config.yaml", result_file, lines_file):
        if not path.is_file():
            raise FileNotFoundError(
                f"--compare names {folder}, which has no {path.relative_to(directory)}; evaluate it first: "
                f"`python -m rag_mm.evaluate --run-dir {folder}` with the same --split and --num"
            )
    (own,) = check_rows([own or row_of(read_config(directory))], where="--compare")
    text = lines_file.read_text(encoding="utf-8")
    lines = [line for line in map(json.loads, text.split("\n")[:-1]) if line["row"] == own]
    if not lines:
        raise ValueError(
            f"{lines_file} has no row {own}; `python -m rag_mm.evaluate --run-dir {folder} --rows {own}` makes it"
        )
    result = json.loads(result_file.read_text(encoding="utf-8"))
    lines.sort(key=lambda line: line["id"])  # the order of the files does not matter
    return Side(folder, own, scores_of(lines), {name: result.get(name) for name in CONTEXT})


def compare(a: Side, b: Side) -> dict[str, Any]:
    """What is written as JSON.

    Raises:
        ValueError: if they did not answer the same questions.
    """
    mine, other = set(a.scores.ids), set(b.scores.ids)
    if mine != other:
        only = [_named(a, mine - other), _named(b, other - mine)]
        raise ValueError(f"a paired comparison needs the same questions on both sides; {'; '.join(only)}")
    differences = bootstrap.compare(a.scores, b.scores)
    values_a, values_b = a.scores.results(), b.scores.results()
    return {
        "a": {"run_dir": a.run_dir, "row": a.row, **a.context},
        "b": {"run_dir": b.run_dir, "row": b.row, **b.context},
        "num_questions": len(a.scores.ids),
        "num_units": len(set(a.scores.units)),
        "differs": [name for name in CONTEXT if a.context[name] != b.context[name]],
        "figures": {name: {"a": values_a[name], "b": values_b[name], **asdict(d)} for name, d in differences.items()},
        "on_one_side_only": sorted(values_a.keys() ^ values_b.keys()),
        "definitions": DEFINITIONS,
        "test": TEST,
    }


def comparison_table(compared: Mapping[str, Any]) -> RenderableType:
    """The same for people."""
    table = Table(
        title=f"{_name(compared['a'])} (a) and {_name(compared['b'])} (b): {compared['num_questions']} questions",
        box=box.SIMPLE_HEAD, title_justify="left", title_style="bold",
    )  # fmt: skip
    for i, name in enumerate(("figure", "a", "b", "a - b", "95 %", "p")):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for name, d in compared["figures"].items():
        ends = f"{d['low']:+.3f} to {d['high']:+.3f}"
        table.add_row(name, f"{d['a']:.3f}", f"{d['b']:.3f}", f"{d['difference']:+.3f}", ends, f"{d['p']:.4f}")
    lines = [compared["test"]]
    for name in compared["differs"]:
        lines.append(f"{name}: {_short(compared['a'][name])} (a), {_short(compared['b'][name])} (b)")
    if compared["on_one_side_only"]:
        lines.append(f"on one side only, not compared: {', '.join(compared['on_one_side_only'])}")
    return Group(table, Text("\n".join(lines), "dim"))


def runs_of(value: str) -> tuple[str, str]:
    """The two runs that ``--compare A,B`` names.

    Raises:
        ValueError: if it does not name two.
    """
    parts: Sequence[str] = [part.strip() for part in value.split(",")]
    if len(parts) != 2 or not all(parts):
        raise ValueError(f"--compare is {value!r}; it must be two folders of runs: --compare RUN_A RUN_B")
    return parts[0], parts[1]


def _name(side: Mapping[str, Any]) -> str:
    return f"{side['run_dir']}:{side['row']}"


def _named(side: Side, ids: set[str]) -> str:
    shown = sorted(ids)[:SHOWN]
    more = f" and {len(ids) - len(shown)} more" if len(ids) > len(shown) else ""
    return f"only {side.run_dir} answered {len(ids)}{': ' if shown else ''}{', '.join(shown)}{more}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else text[:159] + "…"
