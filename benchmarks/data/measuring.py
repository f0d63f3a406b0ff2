"""How these benchmarks measure: cases in turn, in one process, medians of ratios within a round.

Cases alternate round by round, so that a machine that slows down slows all of them. Files are made by the benchmark,
in a folder of its own; the page cache is warm unless ``--cold`` is given, which empties it before every case (as root).
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.pipeline.measuring import machine, median_ratio, report

__all__ = ["RESULTS", "empty_page_cache", "in_turn", "machine", "median_ratio", "options", "report"]

RESULTS = Path(__file__).parent / "results"


def options(name: str, description: str, *, rounds: int = 9) -> argparse.ArgumentParser:
    """``--rounds``, ``--cold``, ``--folder``, ``--out`` and ``--note`` of a benchmark; add others and parse."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.data.{name}", description=description)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"rounds of each case (default {rounds})")
    parser.add_argument("--cold", action="store_true", help="empty the page cache before every case (needs root)")
    temporary = Path(tempfile.gettempdir()) / "rag-mm-benchmarks"
    parser.add_argument("--folder", type=Path, default=temporary, help=f"where files are made (default {temporary})")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="where the results go")
    parser.add_argument("--note", default="", help="kept with the results, such as 'preliminary'")
    return parser


def in_turn(
    cases: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 1, cold: bool = False
) -> dict[str, list[float]]:
    """Seconds of each case in each round."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for round_ in range(warmup + rounds):
        for name, work in cases.items():
            if cold:
                empty_page_cache()
            gc.collect()
            start = time.perf_counter()
            work()
            took = time.perf_counter() - start
            if round_ >= warmup:
                times[name].append(took)
    return times


def empty_page_cache() -> None:
    """Make the next reads come from the disk; PermissionError without root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
