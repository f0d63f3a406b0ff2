"""``train.py`` with workers that read ahead: the same run, also when it is killed and goes on without them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from rag_mm import checkpoint
from tests.processes import children
from tests.rag_mm.test_trainer import ROOT, command, metrics, train

STEPS = ("--train.steps", "16")


def wait_for(condition: Any, *, process: subprocess.Popen[bytes] | None = None) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert (process is None or process.poll() is None) and time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("ended_by", "status"), [(signal.SIGKILL, -9), (signal.SIGTERM, 75)])
def test_a_run_with_workers_ends_without_traces_and_goes_on_without_workers(
    factbook_dir: Path, tmp_path: Path, ended_by: signal.Signals, status: int
):
    expected = train(factbook_dir, tmp_path / "plain", *STEPS)
    kinds = [set(line["padding_share"]) for line in expected]
    assert kinds == [set()] * 2 + [{"answers", "documents", "questions"}] * 14
    assert all(0 <= share < 1 for line in expected for share in line["padding_share"].values())
    run, plan = tmp_path / "run", str(tmp_path / "plain" / "plan.json")
    with_workers = (*STEPS, "--parallel.plan", plan, "--data.workers", "2")
    process = subprocess.Popen(command(factbook_dir, run, *with_workers), cwd=ROOT)
    wait_for(lambda: checkpoint.list_steps(run) and len(metrics(run)) >= 8, process=process)
    below = children(process.pid)
    assert len(below) >= 3  # two workers and the server they were forked from
    process.send_signal(ended_by)
    assert process.wait(timeout=100) == status
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below))
    assert train(factbook_dir, run, *STEPS, "--parallel.plan", plan) == expected


@pytest.mark.slow
def test_a_worker_that_is_ended_ends_the_run_with_a_sentence(factbook_dir: Path, tmp_path: Path):
    process = subprocess.Popen(
        command(factbook_dir, tmp_path, "--train.steps", "2000", "--data.workers", "1"), cwd=ROOT,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(lambda: (tmp_path / "metrics.jsonl").exists() and len(metrics(tmp_path)) >= 2)
    server = {pid for pid in children(process.pid) if children(pid)}
    workers = {pid for parent in server for pid in children(parent)}
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 1 and "a worker died" in said and "Traceback" not in said
