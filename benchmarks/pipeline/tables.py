"""Put the results into docs/benchmarks.md: ``python -m benchmarks.pipeline.tables``.

A table stands between ``<!-- NAME -->`` and ``<!-- /NAME -->`` and comes from ``results/NAME.json``, with the machine,
the date and the note of that run, so that no figure is copied by hand.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.pipeline.measuring import RESULTS

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def markdown(results: dict[str, Any]) -> str:
    """The rows as a table, and what they were measured on."""
    rows, machine = results["rows"], results["machine"]
    columns = list(rows[0])
    lines = [
        "| " + " | ".join(columns) + " |",
        "|" + "|".join("---" if isinstance(rows[0][c], str) else "---:" for c in columns) + "|",
        *("| " + " | ".join(_cell(row[c]) for c in columns) + " |" for row in rows),
        "",
        f"{machine['date']}, {machine['processor']}, {machine['cores']} cores, torch {machine['torch']}, "
        f"{results['rounds']} rounds, load {machine['load_before']} before"
        + (f"; {results['note']}" if results["note"] else "") + ".",
    ]  # fmt: skip
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main(results: Path = RESULTS) -> None:
    """Put every table of a folder of results into its place."""
    text = DOCS.read_text()
    for path in sorted(results.glob("*.json")):
        table = markdown(json.loads(path.read_text()))
        block = re.compile(rf"(<!-- {path.stem} -->\n).*?(<!-- /{path.stem} -->)", re.S)
        if not block.search(text):
            raise SystemExit(
                f"{DOCS} has no place for {path.name}; write <!-- {path.stem} --> and <!-- /{path.stem} -->"
            )
        text = block.sub(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text)  # type: ignore[misc]
    DOCS.write_text(text)
    print(f"written to {DOCS}")


if __name__ == "__main__":
    main()
