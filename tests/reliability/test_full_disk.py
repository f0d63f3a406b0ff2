"""Disks that are full or cannot be written, and permissions that lack: what was there stays, and a sentence says so.

The disks are small tmpfs mounts where this process may mount (root in a container), else the tests are skipped.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from data.prepare import main as prepare
from rag_mm import checkpoint
from rag_mm.config import CheckpointConfig
from rag_mm.disk_advice import advice
from rag_mm.mesh import Mesh
from rag_mm.metrics import MetricsWriter, read_metrics
from rag_mm.saver import Saver
from retriever import index as index_files
from tests.reliability.small_runs import TWO, start
from tests.retriever.test_index import make

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(1200)  # whole runs, on a machine that may be busy


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Makes disks of some KiB, given as ``disk(kib)``; ``mount`` options as further arguments remount the last."""
    mounted: list[Path] = []

    def mount(kib: int, options: str = "") -> Path:
        place = mounted[-1] if options else tmp_path / f"disk-{len(mounted)}"
        place.mkdir(exist_ok=True)
        how = f"remount,{options}" if options else f"size={kib}k,mode=700"
        if subprocess.run(["mount", "-t", "tmpfs", "-o", how, "none", str(place)], capture_output=True).returncode:
            pytest.skip("this process may not mount")
        if not options:
            mounted.append(place)
        return place

    yield mount
    for place in reversed(mounted):
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(folder: Path) -> Path:
    """Take all that is left of a disk; removing the file given makes room again."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError as error:
                assert error.errno == errno.ENOSPC
    return path


def test_an_index_that_does_not_fit_leaves_the_current_one(disk: Callable[..., Path]):
    folder = disk(256)
    index, _ = make(200, 64)
    index.publish(folder)
    fill(folder)
    with pytest.raises(OSError, match=r"index version 1 of .* could not be written"):
        index.publish(folder)
    assert index_files.load(folder).ids == index.ids
    assert [path.name for path in (folder / "versions").iterdir()] == ["0"]  # and nothing half is left


def test_metrics_wait_for_room_and_lose_nothing(disk: Callable[..., Path]):
    folder = disk(256)
    writer = MetricsWriter(folder, start_step=0)
    writer.write({"step": 1, "loss": 1.0})
    filler = fill(folder)
    for step in range(2, 400):
        writer.write({"step": step, "loss": 0.5, "more": "y" * 100})
    assert writer.problem is not None and "space" in writer.problem
    with pytest.raises(OSError, match="space"):
        writer.flush()
    filler.unlink()
    writer.write({"step": 400, "loss": 0.25})
    writer.close()
    assert [line["step"] for line in read_metrics(folder)] == list(range(1, 401))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["full", "read-only"])
def test_preparing_leaves_nothing_half(how: str, disk: Callable[..., Path], capsys: pytest.CaptureFixture[str]):
    folder = disk(512)
    (folder / "kept").write_text("kept")
    if how == "read-only":
        disk(0, "ro")
    assert prepare(["factbook", "--out", str(folder / "factbook")]) == 1
    said = capsys.readouterr().err.strip()
    assert ("No space left" if how == "full" else "Read-only") in said and said.count("\n") == 0
    assert [path.name for path in folder.iterdir()] == ["kept"]


def train(data: Path, run: Path, *options: str) -> subprocess.CompletedProcess[str]:
    argv = [
        sys.executable, "-W", "ignore", str(ROOT / "train.py"), "--data.dir", str(data), "--run-dir", str(run),
        "--reader.width", "16", "--reader.heads", "2", "--reader.ffn_width", "24", "--reader.encoder_layers", "1",
        "--train.batch_size", "8", "--train.pair_batch_size", "8", "--checkpoint.every_n_steps", "3",
        "--parallel.verify", "off", *options,
    ]  # fmt: skip
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=500)


@pytest.mark.slow
def test_a_run_whose_disk_fills_keeps_its_checkpoint_and_goes_on_from_it(factbook_dir: Path, disk: Callable[..., Path]):
    run = disk(1 << 20) / "run"
    assert train(factbook_dir, run, "--train.steps", "6").returncode == 0
    filler = fill(run.parent)
    full = train(factbook_dir, run, "--train.steps", "12")
    assert full.returncode == 1 and "could not be read or written" in full.stderr and "make room" in full.stderr
    assert "Traceback" not in full.stderr
    assert checkpoint.newest_usable(run) == (6, [])
    assert [line["step"] for line in read_metrics(run)] == list(range(1, 7))
    filler.unlink()
    again = train(factbook_dir, run, "--train.steps", "12")
    assert again.returncode == 0 and "resumed from step 6" in again.stderr
    assert [line["step"] for line in read_metrics(run)] == list(range(1, 13))


@pytest.mark.slow
def test_a_disk_that_fills_amid_a_save_of_two_ranks(factbook_dir: Path, disk: Callable[..., Path]):
    """Both find that it failed, neither hangs, the one before stays; the next is there once there is room."""
    options = (*TWO, "--train.steps", "60", "--checkpoint.every_n_steps", "2", "--checkpoint.keep", "1")
    run = start(factbook_dir, disk(1 << 16) / "run", *options)
    run.wait_until(lambda: bool(checkpoint.list_steps(run.folder)))
    (size,) = {sum(p.stat().st_size for p in f.iterdir()) for f in [newest(run.folder)]}
    filler = fill(run.folder.parent)
    os.truncate(filler, filler.stat().st_size - size // 2)  # half of one fits
    run.wait_until(lambda: "A CHECKPOINT COULD NOT BE WRITTEN" in run.said)
    kept = checkpoint.newest_usable(run.folder)
    assert kept[0] is not None and kept[1] == []
    assert "No space left on device" in run.said and "make room there" in run.said
    filler.unlink()
    assert run.end() == 0, run.said
    assert "Traceback" not in run.said
    assert checkpoint.newest_usable(run.folder) == (60, [])
    assert [line["step"] for line in read_metrics(run.folder)] == list(range(1, 61))


def newest(run: Path) -> Path:
    return checkpoint.checkpoint_dir(run, checkpoint.list_steps(run)[-1])


def test_a_disk_that_becomes_read_only_takes_nothing_away(disk: Callable[..., Path]):
    folder = disk(1 << 14)
    tensors = {"reader.a": torch.arange(6.0)}
    saver = Saver(folder, Mesh(num_stages=1, num_replicas=1), CheckpointConfig())
    saver.write(2, tensors, {})
    index, _ = make(200, 64)
    index.publish(folder / "index")
    disk(0, "ro")
    saver.begin(4, tensors, {})
    saver.finish()
    assert saver.problem is not None and "Read-only" in saver.problem
    assert "mount it for writing" in advice(saver.problem, folder)
    with pytest.raises(OSError, match="Read-only"):
        index.publish(folder / "index")
    with pytest.raises(OSError, match="Read-only"):
        MetricsWriter(folder, start_step=0)
    assert checkpoint.newest_usable(folder) == (2, [])
    assert index_files.load(folder / "index").ids == index.ids
    disk(0, "rw")
    saver.begin(6, tensors, {})
    saver.finish()
    saver.close()
    assert saver.problem is None and checkpoint.newest_usable(folder) == (6, [])


def test_a_run_folder_that_cannot_be_written_is_said_before_training(factbook_dir: Path, disk: Callable[..., Path]):
    folder = disk(64)
    disk(0, "ro")
    done = train(factbook_dir, folder / "run", "--train.steps", "2")
    assert done.returncode == 2 and "cannot be written (Read-only file system)" in done.stderr
    assert "Traceback" not in done.stderr


def test_modes_follow_the_umask_and_nothing_is_writable_by_others(tmp_path: Path):
    previous = os.umask(0o027)
    try:
        index, _ = make()
        index.publish(tmp_path / "index")
        writer = MetricsWriter(tmp_path, start_step=0)
        writer.write({"step": 1, "loss": 1.0})
        writer.close()
    finally:
        os.umask(previous)
    for path in tmp_path.rglob("*"):
        assert path.stat().st_mode & 0o027 == 0, path
