"""SIGTERM, SIGINT and SIGKILL at every stage of a run's life: what ends it, with which status, and what goes on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from rag_mm import checkpoint
from tests.reliability.small_runs import TWO, Run, metrics, start, trained
from tests.reliability.test_odd_disk import odd, shim

__all__ = ["shim"]  # a fixture
pytestmark = pytest.mark.timeout(1200)  # several runs one after another, on a machine that may be busy

STEPS = ("--train.steps", "14", "--checkpoint.every_n_steps", "4", "--index.refresh_every_n_steps", "4")


@pytest.fixture(scope="module")
def right(factbook_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, object]]]:
    """A run on two ranks that is left alone: its plan, which the others take, and its metrics."""
    folder = tmp_path_factory.mktemp("right") / "run"
    return folder / "plan.json", trained(factbook_dir, folder, *TWO, *STEPS)


def goes_on(data: Path, run: Run, plan: Path, lines: list[dict[str, object]]) -> None:
    """The same command brings the run to the end that it would have had."""
    again = start(data, run.folder, *TWO, *STEPS, "--parallel.plan", str(plan))
    assert again.end() == 0, again.said
    assert metrics(run.folder) == lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_before_training_begins_the_process_ends_at_once(number: signal.Signals, factbook_dir: Path, tmp_path: Path):
    run = start(factbook_dir, tmp_path / "run", *STEPS)
    end = time.monotonic() + 60
    while not any("libtorch" in line for line in Path(f"/proc/{run.process.pid}/maps").read_text().splitlines()):
        assert time.monotonic() < end
        time.sleep(0.01)
    run.process.send_signal(number)
    assert run.end(limit_s=30) == 75
    assert "run the same command" in run.said and "Traceback" not in run.said and run.said.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["imports", "meets", "plans"])
def test_while_two_ranks_start(
    moment: str, factbook_dir: Path, tmp_path: Path, right: tuple[Path, list[dict[str, object]]]
):
    plan = () if moment == "plans" else ("--parallel.plan", str(right[0]))
    run = start(factbook_dir, tmp_path / "run", *TWO, *STEPS, *plan)
    launcher = run.process.pid

    def children() -> list[str]:
        return Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()

    if moment == "imports":
        run.wait_until(lambda: len(children()) == 2)
    elif moment == "meets":  # one of them has taken the run folder
        run.wait_until(lambda: (run.folder / ".lock").exists())
    else:
        run.wait_until(lambda: "stage 0:" in run.said)
    asked = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    status = run.end(limit_s=60)
    assert status == 75, (status, run.said)
    assert time.monotonic() - asked < 45
    assert "run the same command" in run.said and "Traceback" not in run.said


@pytest.mark.slow
def test_interrupted_twice_in_a_row_the_run_is_the_same(
    factbook_dir: Path, tmp_path: Path, right: tuple[Path, list[dict[str, object]]]
):
    plan, lines = right
    options = (*TWO, *STEPS, "--parallel.plan", str(plan))
    for step in (2, 6):
        run = start(factbook_dir, tmp_path / "run", *options)
        run.wait_for_step(step)
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 75, run.said
        assert len(metrics(run.folder)) == checkpoint.list_steps(run.folder)[-1]
    goes_on(factbook_dir, run, plan, lines)


@pytest.mark.slow
def test_further_signals_change_nothing(
    factbook_dir: Path, tmp_path: Path, right: tuple[Path, list[dict[str, object]]]
):
    plan, lines = right
    run = start(factbook_dir, tmp_path / "run", *TWO, *STEPS, "--parallel.plan", str(plan))
    run.wait_for_step(3)
    for _ in range(3):
        if run.process.poll() is None:
            os.kill(run.process.pid, signal.SIGINT)
        time.sleep(0.05)
    assert run.end() == 75, run.said
    assert "Traceback" not in run.said
    goes_on(factbook_dir, run, plan, lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule, moment",
    [
        ("call=fsync,path=.step-4.tmp,sleep_ms=3000", "checkpoints/.step-4.tmp"),
        ("rank=0,call=fsync,path=versions,sleep_ms=1000", "index/versions/.4.*.tmp"),
    ],
    ids=["a save", "a refresh"],
)
def test_amid(
    rule: str, moment: str, factbook_dir: Path, tmp_path: Path, shim: Path, right: tuple[Path, list[dict[str, object]]]
):
    """A disk that is slow there holds the moment open; SIGTERM is sent within it."""
    plan, lines = right
    run = start(factbook_dir, tmp_path / "run", *TWO, *STEPS, "--parallel.plan", str(plan), environment=odd(shim, rule))
    run.wait_until(lambda: any(run.folder.glob(moment)))
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 75, run.said
    assert checkpoint.newest_usable(run.folder)[0] == len(metrics(run.folder)) >= 4
    goes_on(factbook_dir, run, plan, lines)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_in_time(
    rank: int, factbook_dir: Path, tmp_path: Path, right: tuple[Path, list[dict[str, object]]]
):
    plan, lines = right
    run = start(factbook_dir, tmp_path / "run", *TWO, *STEPS, "--parallel.plan", str(plan))
    run.wait_for_step(6)
    launcher = run.process.pid
    ranks = [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]
    by_rank = {int(environment(pid)["RANK"]): pid for pid in ranks}
    os.kill(by_rank[rank], signal.SIGKILL)
    killed = time.monotonic()
    assert run.end(limit_s=60) == 1, run.said
    assert time.monotonic() - killed < 15
    assert (f"rank {rank}" in run.said and f"process {by_rank[rank]}" in run.said) or "SIGKILL" in run.said
    assert "Traceback" not in run.said
    goes_on(factbook_dir, run, plan, lines)


def environment(pid: int) -> dict[str, str]:
    items = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(item.split("=", 1) for item in items if "=" in item)
