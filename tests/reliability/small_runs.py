"""Runs of ``train.py``, as small as they may be, for tests that disturb them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_mm.metrics import read_metrics

ROOT = Path(__file__).parents[2]
TIMES = ("samples_per_s", "time_s", "peak_memory_bytes")
TWO = ("--parallel.pipeline_stages", "2")
LIMIT_S = 500.0  # for anything; what hangs is killed


@dataclass
class Run:
    """A process, and what it says."""

    process: subprocess.Popen[bytes]
    folder: Path
    log: Path
    said_before: int = 0

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")[self.said_before :]

    def wait_until(self, moment: Callable[[], bool]) -> None:
        """Wait for a moment in the run's life; it must not end before."""
        end = time.monotonic() + LIMIT_S
        while not moment():
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.said}"
            assert time.monotonic() < end, f"still waiting: {self.said}"
            time.sleep(0.01)

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: (self.folder / "metrics.jsonl").exists() and len(read_metrics(self.folder)) >= step)

    def end(self, *, limit_s: float = LIMIT_S) -> int:
        """Its exit status; no rank may be left."""
        try:
            return self.process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)
            raise AssertionError(f"still running after {limit_s:g} s: {self.said}") from None


def command(data: Path, folder: Path, *options: str) -> list[str]:
    return [
        sys.executable, "-W", "ignore", str(ROOT / "train.py"), "--data.dir", str(data), "--run-dir", str(folder),
        "--reader.width", "16", "--reader.heads", "2", "--reader.ffn_width", "24", "--reader.encoder_layers", "1",
        "--retriever.text_dim", "32", "--train.batch_size", "8", "--train.retriever_batch_size", "8",
        "--train.pair_batch_size", "8", "--train.retriever_share", "0", "--parallel.verify", "off",
        "--parallel.timeline", "false", "--checkpoint.visible_s", "20", *options,
    ]  # fmt: skip


def start(
    data: Path,
    folder: Path,
    *options: str,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Run:
    """Start (or go on with) a run; what it says goes to a file beside its folder."""
    log = folder.with_name(f"{folder.name}.log")
    before = len(log.read_text(errors="replace")) if log.exists() else 0
    with log.open("ab") as file:
        process = subprocess.Popen(
            [*prefix, *command(data, folder, *options)], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})}, start_new_session=True,
        )  # fmt: skip
    return Run(process, folder, log, before)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run without what clocks and memory say."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def trained(data: Path, folder: Path, *options: str) -> list[dict[str, Any]]:
    """The metrics of a run that must end well."""
    run = start(data, folder, *options)
    assert run.end() == 0, run.said
    return metrics(folder)
