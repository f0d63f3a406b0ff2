"""Real processes, in place of train.py small programs."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from rag_mm.evaluate.training_jobs import Job, JobsEnded, _progress, run_jobs


@dataclass(frozen=True)
class Program(Job):
    code: str = ""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", self.code]


def program(tmp_path: Path, name: str, code: str) -> Program:
    return Program(name, tmp_path / name, ("--run-dir", str(tmp_path / name)), 2, code)


@pytest.mark.parametrize("at_once", [1, 2])
def test_every_job_is_run_and_reported(tmp_path: Path, at_once: int) -> None:
    code = "import sys; print('hello')"
    seen: list[str] = []
    jobs = [program(tmp_path, name, code) for name in ("a", "b", "c")]
    run_jobs(jobs, at_once=at_once, console=Console(quiet=True), done=lambda job, seconds: seen.append(job.name))
    assert sorted(seen) == ["a", "b", "c"]
    assert at_once == 1 or "hello" in (tmp_path / "c" / "train.log").read_text()


def test_two_at_once_overlap(tmp_path: Path) -> None:
    """Each waits for a file of the other, so one after another they would wait for ever."""
    wait = (
        "import pathlib,time\npathlib.Path({mine!r}).touch()\n"
        "while not pathlib.Path({other!r}).exists(): time.sleep(.01)"
    )
    a, b = str(tmp_path / "a.there"), str(tmp_path / "b.there")
    jobs = [
        program(tmp_path, "a", wait.format(mine=a, other=b)),
        program(tmp_path, "b", wait.format(mine=b, other=a)),
    ]
    run_jobs(jobs, at_once=2, console=Console(quiet=True), done=lambda job, seconds: None)


def test_a_failure_hands_on_its_status_and_ends_the_others(tmp_path: Path) -> None:
    marker = tmp_path / "told"
    patient = (
        "import pathlib,signal,sys,time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(marker)!r}).touch(), sys.exit(75)))\n"
        f"pathlib.Path({str(tmp_path / 'ready')!r}).touch()\ntime.sleep(60)"
    )
    failing = (
        "import pathlib,sys,time\n"
        f"while not pathlib.Path({str(tmp_path / 'ready')!r}).exists(): time.sleep(.01)\n"
        "print('train.steps is wrong'); sys.exit(2)"
    )
    jobs = [program(tmp_path, "patient", patient), program(tmp_path, "failing", failing)]
    with pytest.raises(JobsEnded, match=r"train\.steps is wrong") as ended:
        run_jobs(jobs, at_once=2, console=Console(quiet=True), done=lambda job, seconds: None)
    assert ended.value.status == 2
    assert marker.exists()


def test_an_interruption_waits_for_the_checkpoint(tmp_path: Path) -> None:
    code = (
        "import pathlib,signal,sys,time\n"
        f"safe = pathlib.Path({str(tmp_path / 'safe')!r})\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(.3), safe.touch(), sys.exit(75)))\n"
        f"pathlib.Path({str(tmp_path / 'ready')!r}).touch()\ntime.sleep(60)"
    )

    def interrupt() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(JobsEnded, match="run the same command") as ended:
        run_jobs([program(tmp_path, "a", code)], at_once=1, console=Console(quiet=True), done=lambda job, s: None)
    assert ended.value.status == 75 and (tmp_path / "safe").exists()
    assert signal.getsignal(signal.SIGINT) is before


def test_progress_is_the_last_whole_line(tmp_path: Path) -> None:
    job = program(tmp_path, "a", "")
    assert _progress(job) == {}
    job.run_dir.mkdir()
    line = {"loss": 1.5, "hit_at_k": None, "samples_per_s": 10.0}
    text = "".join(json.dumps({"step": step, **line}) + "\n" for step in range(1, 200)) + '{"step": 200, "lo'
    (job.run_dir / "metrics.jsonl").write_text(text)
    assert _progress(job)["completed"] == 199
