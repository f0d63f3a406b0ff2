"""Results for people: the table on the terminal, and the same as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rag_mm.evaluate.rows import ROWS

COLUMNS = (
    "row", "EM", "95 %", "F1", "EM\nname", "EM\npict.", "EM\nunseen", "hit@1\nname", "hit@1\npict.",
    "hit@4\npict.",
)  # fmt: skip
NOT_TRAINED = "· not trained here; this trains all rows:\n  python -m rag_mm.experiment --config configs/factbook.yaml"
LEGEND = (
    "EM, F1: best accepted answer. 95 %: of EM, bootstrap over subjects.\n"
    "name, pict.: questions by name and by picture. unseen: those with an answer\n"
    "that no training question has. hit@k: a right document among the first k."
)


def cells(row: Mapping[str, Any]) -> list[str]:
    """One row of the table, in the order of COLUMNS."""
    interval = row["em_interval"]
    return [
        row["name"],
        number(row["em"]),
        f"{interval[0]:.2f}–{interval[1]:.2f}" if interval else "–",
        number(row["f1"]),
        *(number(row["em_by_kind"][kind]) for kind in ("name", "picture")),
        number(row["em_unseen_answers"]),
        *(number(row["hit@1"][kind]) for kind in ("name", "picture")),
        number(row["hit@4"]["picture"]),
    ]


def number(value: float | None) -> str:
    """Three digits; a dash for what does not apply."""
    return "–" if value is None else f"{value:.3f}"


def result_table(result: Mapping[str, Any], *, left_out: Sequence[str] = ()) -> RenderableType:
    """The table of a result file.

    Args:
        left_out: rows that another configuration trains; named under the table's rows.
    """
    table = Table(
        title=title(result), box=box.SIMPLE_HEAD, show_edge=False, padding=0, title_justify="left",
        title_style="bold",
    )  # fmt: skip
    for i, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    best = max((row["em"] for row in result["rows"] if row["em"] is not None), default=None)
    for row in result["rows"]:
        style = "bold" if row["em"] is not None and row["em"] == best else ""
        table.add_row(*cells(row), style=style)
    for name in left_out:
        table.add_row(name, *["·"] * (len(COLUMNS) - 1), style="dim")
    parts: list[RenderableType] = [table]
    if left_out:
        parts.append(Text(NOT_TRAINED, "dim"))
    parts.append(Text(LEGEND, "dim"))
    parts.append(Text("\n".join(f"{row['name']}: {ROWS[row['name']].about}" for row in result["rows"]), "dim"))
    return Group(*parts)


def title(result: Mapping[str, Any]) -> str:
    fold = result["fold"]
    where = f"fold {fold}" if isinstance(fold, int) else f"folds {', '.join(map(str, fold))} pooled"
    text = f"{result['num_questions']} questions of the {result['split']} split ({where}), "
    text += f"{result['num_documents']} documents in the memory"
    if result.get("step") is not None and result["step"] < result["steps"]:
        text += f"; unfinished: weights of step {result['step']} of {result['steps']}"
    return text


def field_table(result: Mapping[str, Any]) -> Table:
    """Exact match by field, one column a row of the result."""
    rows = [row for row in result["rows"] if row["em"] is not None]
    table = Table(
        title="EM by field", box=box.SIMPLE_HEAD, show_edge=False, padding=0, title_justify="left",
        title_style="bold",
    )  # fmt: skip
    table.add_column("field", no_wrap=True)
    for row in rows:
        table.add_column(row["name"].replace("_", "\n"), justify="right")
    fields = dict.fromkeys(field for row in rows for field in row["em_by_field"])
    for field in fields:
        table.add_row(field, *(number(row["em_by_field"].get(field)) for row in rows))
    return table


def comparison_lines(result: Mapping[str, Any]) -> list[str]:
    """Each paired comparison in one line."""
    return [
        f"{c['row']} - {c['minus']}, {c['metric']}"
        + (f" ({c['kind']} questions)" if c["kind"] != "all" else "")
        + f": {c['difference']:+.3f} (95 %: {c['low']:+.3f} to {c['high']:+.3f})"
        for c in result["comparisons"]
    ]


def markdown(result: Mapping[str, Any]) -> str:
    """Table, fields and comparisons as Markdown."""
    rows = [row for row in result["rows"] if row["em"] is not None]
    fields = dict.fromkeys(field for row in rows for field in row["em_by_field"])
    columns = [name.replace("\n", " ") for name in COLUMNS]
    parts = [f"{title(result)}.", _markdown_table(columns, [cells(row) for row in result["rows"]])]
    if fields:
        head = ["EM by field", *(row["name"] for row in rows)]
        body = [[field, *(number(row["em_by_field"].get(field)) for row in rows)] for field in fields]
        parts.append(_markdown_table(head, body))
    if result["comparisons"]:
        parts.append(
            "Paired bootstrap over subjects:\n\n" + "\n".join(f"- {line}" for line in comparison_lines(result))
        )
    return "\n\n".join(parts) + "\n"


def _markdown_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))
