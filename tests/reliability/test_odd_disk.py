"""Slow, late and once broken disks, under whole runs.

The disk is odd through ``odd_disk.c``, which is compiled here and loaded into the launched processes with LD_PRELOAD.
A FUSE file system would be closer to NFS, but needs a library and a device that few test machines have; a shim in
Python would miss what safetensors (Rust) and faiss (C++) open themselves.
"""

from __future__ import annotations

import errno
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from rag_mm import checkpoint
from rag_mm.metrics import read_metrics
from tests.reliability.small_runs import TWO, Run, metrics, start, trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # whole runs, on a machine that may be busy


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    out = tmp_path_factory.mktemp("shim") / "odd_disk.so"
    source = Path(__file__).with_name("odd_disk.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(out), str(source), "-ldl"], check=True)
    return out


def odd(shim: Path, *rules: str) -> dict[str, str]:
    return {"LD_PRELOAD": str(shim), "ODD_DISK": ";".join(rules)}


def test_a_slow_disk_stops_no_step(factbook_dir: Path, tmp_path: Path, shim: Path):
    slow = odd(shim, "call=fsync,path=checkpoints,sleep_ms=1500")
    run = start(
        factbook_dir, tmp_path / "run", *TWO, "--train.steps", "30", "--checkpoint.every_n_steps", "5",
        environment=slow,
    )  # fmt: skip
    begun = None
    run.wait_for_step(5)
    begun = time.monotonic()
    run.wait_until(lambda: checkpoint.list_steps(run.folder) == [5])
    took, steps = time.monotonic() - begun, len(read_metrics(run.folder))
    assert run.end() == 0, run.said
    lines = read_metrics(run.folder)
    waited = [line["time_s"]["checkpoint"] for line in lines[5 : min(steps, 10)]]
    assert took > 3 and steps > 5 and waited and max(waited) < 1.0  # of an fsync of the tensors, the state, the folder


def test_the_limit_on_the_last_checkpoint_holds_and_nothing_is_lost(factbook_dir: Path, tmp_path: Path, shim: Path):
    folder = tmp_path / "run"
    options = (*TWO, "--train.steps", "40", "--checkpoint.limit_s", "3", "--checkpoint.every_n_steps", "0")
    first = start(factbook_dir, folder, *options)
    first.wait_for_step(2)
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 75, first.said
    (safe,) = checkpoint.list_steps(folder)
    stuck = start(factbook_dir, folder, *options, environment=odd(shim, "call=fsync,path=.tmp/,sleep_ms=100000"))
    stuck.wait_for_step(safe + 2)
    asked = time.monotonic()
    stuck.process.send_signal(signal.SIGTERM)
    assert stuck.end(limit_s=60) == 1, stuck.said
    assert time.monotonic() - asked < 30  # the limit, a step, and what a busy machine adds
    assert "still writing the checkpoint after 3 s" in stuck.said
    assert f"the last checkpoint is of step {safe}" in stuck.said and "run the same command" in stuck.said
    assert "Traceback" not in stuck.said
    assert checkpoint.newest_usable(folder) == (safe, [])
    again = start(factbook_dir, folder, *options)
    assert again.end() == 0 and f"resumed from step {safe}" in again.said
    assert [line["step"] for line in metrics(folder)] == list(range(1, 41))


def interrupted(data: Path, folder: Path, *options: str) -> int:
    """A run that was interrupted; gives the step of its checkpoint."""
    run = start(data, folder, *options)
    run.wait_for_step(3)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 75, run.said
    return checkpoint.list_steps(folder)[-1]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_sees_late_is_waited_for(rank: int, factbook_dir: Path, tmp_path: Path, shim: Path):
    """As after a restart on machines that still believe in an older folder."""
    folder, options = tmp_path / "run", (*TWO, "--train.steps", "8", "--checkpoint.every_n_steps", "2")
    step = interrupted(factbook_dir, folder, *options)
    version = checkpoint.read_state(folder, step)["index_version"]
    late = [
        f"rank={rank},call={call},path={path},errno={errno.ENOENT},for_ms=2500"
        for call in ("open", "stat", "list")
        for path in (f"checkpoints/step-{step}", f"index/versions/{version}")
    ]
    run = start(factbook_dir, folder, *options, environment=odd(shim, *late))
    assert run.end() == 0, run.said
    assert f"resumed from step {step}" in run.said and "NOT USED" not in run.said
    assert [line["step"] for line in metrics(folder)] == list(range(1, 9))


def test_what_one_rank_never_sees_ends_the_run_with_a_sentence(factbook_dir: Path, tmp_path: Path, shim: Path):
    folder, options = tmp_path / "run", (*TWO, "--train.steps", "8")
    step = interrupted(factbook_dir, folder, *options)
    gone = [
        f"rank=1,call={call},path=checkpoints/step-{step},errno={errno.ENOENT}" for call in ("open", "stat", "list")
    ]
    run = start(factbook_dir, folder, *options, "--checkpoint.visible_s", "1", environment=odd(shim, *gone))
    assert run.end(limit_s=100) == 1, run.said
    assert "rank 1" in run.said and "could not be read" in run.said and "for 1 s" in run.said
    assert "look at" in run.said and "Traceback" not in run.said
    assert checkpoint.newest_usable(folder) == (step, [])


def test_single_errors_cost_nothing(factbook_dir: Path, tmp_path: Path, shim: Path):
    """One EIO or ESTALE at each place: a periodic checkpoint is lost, the last one and the index are written again."""
    options = (*TWO, "--train.steps", "8", "--checkpoint.every_n_steps", "3", "--index.refresh_every_n_steps", "3")
    right = trained(factbook_dir, tmp_path / "right", *options)
    plan = ("--parallel.plan", str(tmp_path / "right" / "plan.json"))
    folder = tmp_path / "run"
    rules = [
        f"rank=1,call=fsync,path=.step-3.tmp,errno={errno.EIO},times=1",
        f"rank=0,call=rename,path=.step-8.tmp,errno={errno.ESTALE},times=1",
        f"rank=0,call=write,path=metrics.jsonl,errno={errno.EIO},after=2,times=1",
        f"rank=0,call=fsync,path=versions,errno={errno.ESTALE},after=1,times=1",
    ]
    run = start(factbook_dir, folder, *options, *plan, environment=odd(shim, *rules))
    assert run.end() == 0, run.said
    assert "A CHECKPOINT COULD NOT BE WRITTEN" in run.said and "Input/output error" in run.said
    assert "THE CHECKPOINT OF STEP 8 COULD NOT BE WRITTEN" in run.said and "once more" in run.said
    assert "INDEX VERSION 0 COULD NOT BE WRITTEN" in run.said and "Stale file handle" in run.said
    assert metrics(folder) == right
    assert checkpoint.newest_usable(folder) == (8, []) and checkpoint.list_steps(folder) == [6, 8]


def test_a_disk_that_is_read_only_for_a_while(factbook_dir: Path, tmp_path: Path, shim: Path):
    """No checkpoint while it lasts, which is said with what to do; the steps go on, and the next one is there."""
    options = (*TWO, "--train.steps", "8", "--checkpoint.every_n_steps", "3")
    right = trained(factbook_dir, tmp_path / "right", *options)
    folder, plan = tmp_path / "run", ("--parallel.plan", str(tmp_path / "right" / "plan.json"))
    rules = [f"rank={rank},call=open,path=.step-3.tmp,errno={errno.EROFS}" for rank in (0, 1)]
    run = start(factbook_dir, folder, *options, *plan, environment=odd(shim, *rules))
    assert run.end() == 0, run.said
    assert "A CHECKPOINT COULD NOT BE WRITTEN" in run.said and "Read-only file system" in run.said
    assert "mount it for writing" in run.said and "Traceback" not in run.said
    assert metrics(folder) == right
    assert checkpoint.newest_usable(folder) == (8, []) and checkpoint.list_steps(folder) == [6, 8]


def test_reading_a_checkpoint_again_mends_single_errors(factbook_dir: Path, tmp_path: Path, shim: Path):
    folder, options = tmp_path / "run", (*TWO, "--train.steps", "6")
    step = interrupted(factbook_dir, folder, *options)
    rules = [
        f"rank=0,call=open,path=step-{step}/state.json,errno={errno.ESTALE},times=1",
        f"rank=1,call=open,path=step-{step}/shard,errno={errno.EIO},times=1",
        # Twice for the checksum, which failed once: the next is when torch reads the names of the tensors.
        f"rank=1,call=open,path=step-{step}/shard,errno={errno.ESTALE},after=2,times=1",
    ]
    run: Run = start(factbook_dir, folder, *options, environment=odd(shim, *rules))
    assert run.end() == 0, run.said
    assert f"resumed from step {step}" in run.said and "NOT USED" not in run.said
