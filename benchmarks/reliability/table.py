"""Put what `benchmarks.reliability.torture` found into docs/reliability.md: ``python -m benchmarks.reliability.table``.

The table stands between ``<!-- torture -->`` and ``<!-- /torture -->``, so that no figure is copied by hand.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.reliability.torture import RESULTS

DOCS = Path(__file__).parents[2] / "docs" / "reliability.md"


def markdown(result: dict[str, Any]) -> str:
    """The kills by sort, and what was lost."""
    rows = [f"| {row['killed']} | {row['kills']} |" for row in result["rows"]]
    faults = [f"- {fault}" for fault in result["faults"]] or ["Nothing was lost, repeated or unreadable."]
    machine = ", ".join(f"{name} {value}" for name, value in result["machine"].items())
    launched = sum(row["kills"] for row in result["rows"] if row["killed"].startswith("launched"))
    about = (
        f"{result['kills']} kills ({launched} of launched runs) in {result['minutes']:.0f} minutes on "
        f"{result['date']}, {result['finished_runs']} runs and conversions brought to their end and compared, faults: "
        f"{len(result['faults'])}. Slowest end of the other ranks after one had died: {result['slowest_end_s']:.1f} s. "
        "A step of the undisturbed run at which a checkpoint began waited "
        f"{result['checkpoint_wait_s'] * 1e3:.0f} ms for it (median), the one before included. "
        f"Seed {result['seed']}, {result['steps']} steps a run. Machine: {machine}."
    )
    return "\n".join(["| killed | kills |", "|---|---:|", *rows, "", *faults, "", about])


def put(text: str, table: str) -> str:
    """``text`` with the table between its two marks.

    Raises:
        ValueError: if it has no place for it.
    """
    block = re.compile(r"(<!-- torture -->\n).*?(<!-- /torture -->)", re.S)
    if not block.search(text):
        raise ValueError("there is no place for the table; write <!-- torture --> and <!-- /torture -->")
    return block.sub(lambda found: f"{found[1]}{table}\n{found[2]}", text)


if __name__ == "__main__":
    DOCS.write_text(put(DOCS.read_text(), markdown(json.loads((RESULTS / "torture.json").read_text()))))
    print(f"written to {DOCS}")
