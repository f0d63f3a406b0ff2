"""Checkpoints written beside the steps: by a slow disk, a broken one, on ranks of which one is late."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rag_mm import checkpoint
from rag_mm.config import CheckpointConfig
from rag_mm.mesh import Mesh
from rag_mm.saver import Saver
from retriever import checkpoint_files
from tests.distributed import run_on_ranks
from tests.rag_mm.test_checkpoint import alone, blank, tensors, written


def test_steps_go_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    may_write, write = threading.Event(), checkpoint_files.write_tensors

    def held_back(*arguments: Any, **options: Any) -> Any:
        may_write.wait()
        return write(*arguments, **options)

    monkeypatch.setattr(checkpoint_files, "write_tensors", held_back)
    saver, state = Saver(tmp_path, alone(), CheckpointConfig()), tensors(1)
    saver.begin(4, state, {"index_version": 2})
    assert saver.poll() and checkpoint.list_steps(tmp_path) == [] and saver.pending_state["index_version"] == 2
    for tensor in state.values():  # the next step, before anything is on disk
        tensor.add_(1)
    may_write.set()
    saver.finish()
    assert not saver.poll() and checkpoint.list_steps(tmp_path) == [4] and saver.problem is None
    found = blank()
    checkpoint.load(tmp_path, 4, found)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(1).items())
    saver.close()


def test_one_that_cannot_be_written_is_said_and_harms_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saver = Saver(written(tmp_path), alone(), CheckpointConfig())

    def full(*arguments: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_files, "write_tensors", full)
    saver.begin(9, tensors(9), {})
    saver.finish()
    assert saver.problem is not None and "No space left" in saver.problem
    assert checkpoint.list_steps(tmp_path) == [3, 6]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.startswith(".")] == []
    monkeypatch.undo()
    saver.begin(12, tensors(12), {})
    saver.finish()
    assert saver.problem is None and checkpoint.newest_usable(tmp_path)[0] == 12
    saver.close()


def test_an_interrupted_run_waits_for_its_checkpoint_only_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    may_end = threading.Event()
    monkeypatch.setattr(checkpoint_files, "write_tensors", lambda *_, **__: may_end.wait() and {})
    saver = Saver(tmp_path, alone(), CheckpointConfig())
    saver.begin(4, tensors(), {})
    saver.finish(limit_s=0.05)
    assert saver.problem == "rank 0 was still writing the checkpoint after 0.05 s"
    assert checkpoint.list_steps(tmp_path) == []
    may_end.set()
    saver.close()


def test_weights_that_are_not_finite_do_not_rotate_good_ones_away(tmp_path: Path):
    saver = Saver(written(tmp_path), alone(), CheckpointConfig(keep=2))
    bad = tensors() | {"reader.a.weight": torch.full((5, 3), float("nan"))}
    for step in (9, 12, 15):
        saver.begin(step, bad, {"good": True})
    saver.finish()
    saver.close()
    assert checkpoint.list_steps(tmp_path) == [3, 6, 15]


def test_the_best_by_a_metric_stays(tmp_path: Path):
    saver = Saver(tmp_path, alone(), CheckpointConfig(keep=1, best_by="loss"))
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5)):
        saver.begin(step, tensors(), {"metrics": {"loss": loss}})
    saver.finish()
    saver.close()
    assert checkpoint.list_steps(tmp_path) == [2, 4]


def test_a_slow_disk_stops_no_step_until_the_next_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every fsync takes as long as the test likes, those that seal and rename included."""
    may_go, fsync, by = threading.Semaphore(0), os.fsync, []

    def slow(descriptor: int) -> None:
        by.append(threading.current_thread())
        may_go.acquire(timeout=60)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    saver, steps = Saver(tmp_path, alone(), CheckpointConfig()), 0
    saver.begin(4, tensors(), {})
    while saver.poll():  # each poll is a step that frees one fsync, so there are as many steps as files to wait for
        steps += 1
        may_go.release()
        time.sleep(0.001)
    assert steps >= len(by) >= 3 and threading.main_thread() not in by
    assert checkpoint.list_steps(tmp_path) == [4] and saver.problem is None
    saver.close()


def test_the_first_attempt_at_the_last_checkpoint_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fsync, said, failures = os.fsync, [], [OSError(errno.EIO, "Input/output error")]

    def once(descriptor: int) -> None:
        if failures:
            raise failures.pop()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", once)
    saver = Saver(tmp_path, alone(), CheckpointConfig(), say=said.append)
    saver.write(4, tensors(4), {})
    saver.close()
    assert checkpoint.newest_usable(tmp_path) == (4, [])
    assert "Input/output error" in said[0] and "once more" in said[0]
    found = blank()
    checkpoint.load(tmp_path, 4, found)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(4).items())


def test_one_that_always_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    saver = Saver(tmp_path, alone(), CheckpointConfig())
    with pytest.raises(OSError, match="Input/output error"):
        saver.write(4, tensors(), {})
    saver.close()
    assert checkpoint.list_steps(tmp_path) == []


def test_one_is_there_even_if_old_ones_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    saver = Saver(written(tmp_path, (1, 2, 3)), alone(), CheckpointConfig(keep=1), say=said.append)

    def busy(folder: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr("rag_mm.saver.remove_folder", busy)
    saver.begin(4, tensors(), {})
    saver.finish()
    saver.close()
    assert saver.problem is None and 4 in checkpoint.list_steps(tmp_path)
    assert "could not be removed" in said[0] and "Directory not empty" in said[0]


def test_what_must_be_durable_first_is_before_it_appears(tmp_path: Path):
    seen: list[list[int]] = []
    saver = Saver(
        tmp_path, alone(), CheckpointConfig(), durable_first=lambda: seen.append(checkpoint.list_steps(tmp_path))
    )
    saver.begin(4, tensors(), {})
    saver.finish()
    saver.durable_first = lambda: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device"))
    saver.begin(6, tensors(), {})
    saver.finish()
    saver.close()
    assert seen == [[]] and checkpoint.list_steps(tmp_path) == [4]
    assert saver.problem is not None and "No space left" in saver.problem


def fail_on_one(folder: str, broken: int, where: str) -> tuple[str | None, str | None, list[int]]:
    """Two ranks, of which one cannot write the first checkpoint, or not in time; then the next."""
    mesh = Mesh(num_stages=2, num_replicas=1)
    mine = {f"reader.{mesh.rank}": torch.full((3,), float(mesh.rank)), "retriever.table": torch.arange(4.0)}
    saver, fsync, may_go = Saver(folder, mesh, CheckpointConfig(), timeout_s=60), os.fsync, threading.Event()

    def odd(descriptor: int) -> None:
        if where == "late":
            may_go.wait(30)
        elif where in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    if mesh.rank == broken:
        os.fsync = odd
    try:
        saver.begin(5, mine, {"index_version": None})
        saver.finish(limit_s=0.3 if where == "late" and mesh.rank == broken else None)
        first = saver.problem
    finally:
        os.fsync = fsync
        may_go.set()
    saver.begin(6, mine, {"index_version": None})
    saver.finish()
    saver.close()
    return first, saver.problem, checkpoint.list_steps(folder)


@pytest.mark.parametrize(
    "broken, where, said",
    [
        (0, ".safetensors", "No space left"),
        (1, ".safetensors", "No space left"),
        (0, "state.json", "No space left"),
        (1, "late", "ranks 0, 1 were still writing the checkpoint after 0.30 s"),
        (0, "late", "0, 1 were still writing the checkpoint after 0.30 s"),
    ],
)
def test_ranks_agree_that_one_failed_and_the_next_is_there(broken: int, where: str, said: str, tmp_path: Path):
    results = run_on_ranks(fail_on_one, 2, str(tmp_path), broken, where, timeout_s=90)
    for first, second, steps in results:
        assert first is not None and said in first
        assert (second, steps) == (None, [6])
    assert checkpoint.newest_usable(tmp_path) == (6, [])
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-6"]
