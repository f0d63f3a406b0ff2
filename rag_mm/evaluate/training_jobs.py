"""Training runs as processes of their own: one after another in this terminal, or several at a time.

Every run resumes by itself (`train.py` does), so starting the same jobs again continues where they were.
One at a time, a run writes to this terminal, with its own live line; several at a time, each writes
``train.log`` in its folder and a bar per run is drawn from its ``metrics.jsonl``. An interruption is passed
on, the runs write their checkpoints, and only then does it end here.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).resolve().parents[2]
EXIT_INTERRUPTED = 75
POLL_S = 0.2
SAY_EVERY_S = 30.0  # without a terminal, instead of bars


class JobsEnded(Exception):
    """Not all jobs were done; ``status`` is the exit status to hand on, the message says why."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        name: for people.
        flags: what train.py is given.
        steps: how many steps it will have taken when done.
    """

    name: str
    run_dir: Path
    flags: tuple[str, ...]
    steps: int

    @property
    def command(self) -> list[str]:
        return [sys.executable, str(ROOT / "train.py"), *self.flags]

    @property
    def shown(self) -> str:
        """The command as a person would type it."""
        return shlex.join(["python", "train.py", *self.flags])


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    started: float
    task: TaskID | None = None
    files: ExitStack = field(default_factory=ExitStack)


def run_jobs(jobs: Sequence[Job], *, at_once: int, console: Console, done: Callable[[Job, float], None]) -> None:
    """Run all jobs; ``done(job, seconds)`` is called after each, while others go on.

    Raises:
        JobsEnded: as soon as one fails (the others are interrupted and checkpointed first), or when
            this process was told to stop.
    """
    waiting, running = list(jobs), list[_Running]()
    stop, several = _Stop(running), at_once > 1
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"),
        TimeElapsedColumn(), TextColumn("{task.fields[live]}"), console=console,
        disable=not (several and console.is_terminal),
    )  # fmt: skip
    said = time.monotonic()
    with stop, bar:
        try:
            while (waiting or running) and not stop.asked:
                while waiting and len(running) < at_once:
                    running.append(_start(waiting.pop(0), bar, to_log=several, console=console))
                time.sleep(POLL_S)
                if several:
                    say = not console.is_terminal and time.monotonic() - said > SAY_EVERY_S
                    said = time.monotonic() if say else said
                    _show(running, bar, console if say else None)
                for item in [item for item in running if item.process.poll() is not None]:
                    running.remove(item)
                    item.files.close()
                    if item.process.returncode != 0:
                        raise _ended(item.job, item.process.returncode, logged=several)
                    done(item.job, time.perf_counter() - item.started)
        finally:
            for item in running:
                if item.process.poll() is None:
                    item.process.send_signal(signal.SIGTERM)
            for item in running:
                item.process.wait()
                item.files.close()
    if stop.asked:
        raise JobsEnded("interrupted; run the same command to go on", EXIT_INTERRUPTED)


class _Stop:
    """Passes SIGINT and SIGTERM on to the running jobs and remembers that they came."""

    def __init__(self, running: list[_Running]) -> None:
        self.asked = False
        self._running = running
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> _Stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._pass_on)
        return self

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        for item in self._running:
            if item.process.poll() is None:
                item.process.send_signal(signal.SIGTERM)

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def _start(job: Job, bar: Progress, *, to_log: bool, console: Console) -> _Running:
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    started = time.perf_counter()
    if not to_log:
        console.print(f"[dim]$ {escape(job.shown)}[/]", highlight=False, soft_wrap=True)
        process = subprocess.Popen(job.command, env=environment, start_new_session=True)
        return _Running(job, process, started)
    job.run_dir.mkdir(parents=True, exist_ok=True)
    files = ExitStack()
    log = files.enter_context((job.run_dir / "train.log").open("ab"))
    log.write(f"$ {job.shown}\n".encode())
    log.flush()
    process = subprocess.Popen(
        job.command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    return _Running(job, process, started, bar.add_task(job.name, total=job.steps, live=""), files)


def _show(running: Sequence[_Running], bar: Progress, console: Console | None) -> None:
    """Bring the bars up to date, and say the same in lines if a console is given."""
    for item in running:
        state = _progress(item.job)
        if item.task is not None and state:
            bar.update(item.task, **state)
        if console is not None:
            step, live = state.get("completed", 0), state.get("live", "")
            console.print(f"{item.job.name}  step {step}/{item.job.steps}  {live}", highlight=False)


def _progress(job: Job) -> dict[str, Any]:
    """Steps and live figures from the last whole line of the run's metrics."""
    try:
        with (job.run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            lines = file.read().split(b"\n")[:-1]
        record = json.loads(lines[-1])
    except (FileNotFoundError, IndexError, ValueError):
        return {}  # not begun, or in the middle of being written
    live = f"loss {record['loss']:.2f}" if record["loss"] is not None else ""
    if record["hit_at_k"] is not None:
        live += f"  hit@k {record['hit_at_k']:.2f}"
    return {"completed": record["step"], "live": f"{live}  {record['samples_per_s']:.0f} samples/s"}


def _ended(job: Job, status: int, *, logged: bool) -> JobsEnded:
    if status == EXIT_INTERRUPTED:
        return JobsEnded(f"{job.name} was interrupted; run the same command to go on", status)
    message = f"training of {job.name} failed with exit status {status}: {job.shown}"
    if logged:
        path = job.run_dir / "train.log"
        tail = path.read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
        message += "\n" + "\n".join(tail) + f"\n(the whole log: {path})"
    return JobsEnded(message, status if status > 0 else 1)
