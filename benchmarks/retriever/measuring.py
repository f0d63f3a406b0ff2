"""How these benchmarks measure: as those of data do (`benchmarks.data.measuring`), and anonymous memory."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from benchmarks.data.measuring import in_turn, machine, median_ratio, report

__all__ = ["RESULTS", "PeakMemory", "in_turn", "machine", "median_ratio", "options", "report"]

RESULTS = Path(__file__).parent / "results" / "index"  # what benchmarks.retriever.tables puts into the docs


def options(name: str, description: str, *, rounds: int = 5) -> argparse.ArgumentParser:
    """``--rounds``, ``--folder``, ``--out`` and ``--note`` of a benchmark; add others and parse."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.retriever.{name}", description=description)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"rounds of each case (default {rounds})")
    temporary = Path(tempfile.gettempdir()) / "rag-mm-benchmarks"
    parser.add_argument("--folder", type=Path, default=temporary, help=f"where files are made (default {temporary})")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="where the results go")
    parser.add_argument("--note", default="", help="kept with the results, such as 'preliminary'")
    return parser


class PeakMemory:
    """The most anonymous memory that this process had within, beyond what it had before (bytes).

    Read from the kernel every 20 ms. Pages of mapped files are left out: the kernel takes them back when it needs them.
    """

    def __init__(self) -> None:
        self.before = self.peak = self.now()
        self._stop = threading.Event()

    @staticmethod
    def now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    @property
    def grown(self) -> int:
        return self.peak - self.before

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, self.now())
            if self._stop.wait(0.02):
                return
