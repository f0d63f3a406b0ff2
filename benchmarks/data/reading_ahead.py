"""What ``data.workers`` takes off a training step: ``python -m benchmarks.data.reading_ahead --data data/factbook``.

The quickstart's model on one rank, the same steps with 0 workers and with 1, in turn; medians over reader steps of
the time before the forward pass (samples, queries' features, search, documents, the reader's batch) and of all of it.
Losses and digests of both are compared: they must be the same, bit for bit. A worker needs a core of its own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.data.measuring import machine, median_ratio, options, report

ROOT = Path(__file__).parents[2]
SAME = ("loss", "losses", "grad_norm", "data_digest", "retrieved_digest")
SKIPPED = 5  # steps after the reader joins: first shapes, cold caches


def run(data: Path, folder: Path, *, workers: int, steps: int) -> list[dict[str, Any]]:
    """The lines of metrics of a run."""
    command = [
        sys.executable, "-W", "ignore", "train.py", "--config", "configs/quickstart.yaml", "--data.dir", str(data),
        "--run-dir", str(folder), "--train.steps", str(steps), "--train.retriever_share", "0.1",
        "--parallel.pipeline_stages", "1", "--parallel.verify", "off", "--data.workers", str(workers),
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = options("reading_ahead", "what workers take off a training step", rounds=3)
    parser.add_argument(
        "--data", type=Path, default=ROOT / "data" / "factbook", help="data set (default data/factbook)"
    )
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    before: dict[int, list[float]] = {0: [], 1: []}
    whole: dict[int, list[float]] = {0: [], 1: []}
    expected: list[Any] = []
    for _ in range(given.rounds):
        for workers in (0, 1):
            with tempfile.TemporaryDirectory() as folder:
                lines = run(given.data, Path(folder) / "run", workers=workers, steps=given.steps)
            found = [[line[name] for name in SAME] for line in lines]
            expected = expected or found
            assert found == expected, "workers changed a number"
            times = [line["time_s"] for line in lines if "generation" in line["losses"]][SKIPPED:]
            before[workers].append(statistics.median(t["retrieve"] + t["fetch"] for t in times))
            whole[workers].append(statistics.median(sum(t.values()) - t["checkpoint"] for t in times))
    rows = [
        {
            "data.workers": workers,
            "before the forward pass ms": 1e3 * statistics.median(before[workers]),
            "of 0 workers": median_ratio(before[workers], before[0]),
            "step ms": 1e3 * statistics.median(whole[workers]),
            "step, of 0 workers": median_ratio(whole[workers], whole[0]),
        }
        for workers in (0, 1)
    ]
    report(given, {"machine": machine(), "steps": given.steps}, rows, "A step with and without a worker")


if __name__ == "__main__":
    main()
