"""``index.refresh: async``: embedded beside the steps from a durable snapshot, adopted at one certain step."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rag_mm import checkpoint, launch
from rag_mm.background_refresh import BackgroundRefresh, RefreshError
from rag_mm.trainer import Trainer
from retriever import index as index_files
from retriever.embed import embed_documents
from tests.distributed import run_on_ranks
from tests.processes import children
from tests.rag_mm.refreshed_runs import metrics, opened, settings, train, train_on_ranks
from tests.rag_mm.test_trainer import ROOT, command

# The reader joins at step 2, with the first version; a refresh begins before step 5 and is adopted before step 7.
ASYNC = {"refresh": "async", "refresh_every_n_steps": 3, "refresh_lag": 2}
RUN = {"index": ASYNC, "steps": 8, "retriever_share": 0.25}
VERSIONS = [None, None, 2, 2, 2, 2, 2, 5]


def background(trainer: Trainer) -> BackgroundRefresh:
    found = trainer.upkeep._background
    assert found is not None
    return found


def job(trainer: Trainer) -> subprocess.Popen[bytes]:
    process = background(trainer)._process
    assert process is not None
    return process


@pytest.fixture(scope="module")
def undisturbed(factbook_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    run = tmp_path_factory.mktemp("async") / "run"
    return run, train(settings(factbook_dir, run, **RUN))


def cut_back(source: Path, target: Path, step: int) -> None:
    """A copy of a run folder as a kill after the checkpoint of ``step`` leaves it, later versions not made yet."""
    shutil.copytree(source, target)
    for later in checkpoint.list_steps(target):
        if later > step:
            shutil.rmtree(target / "checkpoints" / f"step-{later}")
    for version in index_files.list_versions(target / "index"):
        if version >= step - 1:
            shutil.rmtree(target / "index" / "versions" / str(version))


def test_it_is_adopted_lag_steps_later_and_holds_the_snapshot_s_weights(factbook_dir: Path, tmp_path: Path):
    trainer = opened(settings(factbook_dir, tmp_path / "run", **RUN))
    seen, at_begin = [], torch.zeros(0)
    store, encoder = trainer.dataset.store, trainer.model.encoder
    for step in range(8):
        if step == 5:
            with torch.no_grad():
                at_begin = embed_documents(encoder, store, store.ids, image_size=24, batch_size=16)
        seen.append(trainer.train_step()["index_version"])
        pending = background(trainer).pending
        assert (pending is not None) == (step in (5, 6)), step
    assert seen == VERSIONS
    vectors = index_files.load(tmp_path / "run" / "index", version=5).vectors.reconstruct_n(0, len(store))
    assert torch.equal(torch.from_numpy(vectors), at_begin)
    with torch.no_grad():
        assert not torch.equal(
            embed_documents(encoder, store, store.ids, image_size=24, batch_size=16), at_begin
        )  # trained on meanwhile
    assert trainer.memory.staleness is not None
    trainer.upkeep.close()


def test_a_run_says_what_it_searched_and_cleans_up(undisturbed: tuple[Path, dict[str, Any]]):
    run, done = undisturbed
    assert [line["index_version"] for line in done["lines"]] == VERSIONS
    named = {checkpoint.read_state(run, step)["index_version"] for step in checkpoint.list_steps(run)}
    assert named == {None, 2, 5} and index_files.list_versions(run / "index") == [2, 5]
    pending = checkpoint.read_state(run, 6)["refresh"]
    assert pending["step"] == 5 and checkpoint.read_state(run, 8)["refresh"] is None
    assert [path.name for path in (run / "refresh").glob("step-*")] == ["step-5"]  # the checkpoint of step 6 needs it


@pytest.mark.parametrize("step", [4, 6])
def test_resumed_before_and_within_a_refresh_is_the_same_run(
    factbook_dir: Path, tmp_path: Path, undisturbed: tuple[Path, dict[str, Any]], step: int
):
    """At step 6 the refresh is under way, and its version is gone: only the snapshot can tell what it was."""
    cut_back(undisturbed[0], tmp_path / "run", step)
    resumed = train(settings(factbook_dir, tmp_path / "run", **RUN))
    assert resumed["lines"] == undisturbed[1]["lines"]
    for name, tensor in undisturbed[1]["weights"].items():
        assert torch.equal(tensor, resumed["weights"][name]), name


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"ranks": 2}, marks=pytest.mark.slow),
        pytest.param({"replicas": 2}, marks=pytest.mark.slow),
        {"ranks": 2, "parallel": {"towers": "piped"}},
    ],
)
def test_layouts_agree(
    factbook_dir: Path, tmp_path: Path, undisturbed: tuple[Path, dict[str, Any]], how: dict[str, Any]
):
    ranks = run_on_ranks(train_on_ranks, 2, factbook_dir, tmp_path / "run", {**RUN, **how}, timeout_s=280)
    for a, b in zip(undisturbed[1]["lines"], ranks[0]["lines"], strict=True):
        assert (a["retrieved_digest"], a["index_version"]) == (b["retrieved_digest"], b["index_version"])
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)


def test_asked_to_stop_while_it_is_late(
    factbook_dir: Path, tmp_path: Path, undisturbed: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    """The process is held up; training waits, is asked to stop, stops safely, and goes on as if nothing had been."""
    made = settings(factbook_dir, tmp_path / "run", **RUN)
    trainer = opened(made)
    begin = trainer.upkeep._background.begin  # type: ignore[union-attr]

    def held_up(step: int) -> None:
        begin(step)
        os.kill(job(trainer).pid, signal.SIGSTOP)

    monkeypatch.setattr(background(trainer), "begin", held_up)
    with launch.Interrupt() as interrupt:
        poll = background(trainer).poll

        def asked_while_waiting(*, wait: bool = False) -> bool:
            interrupt.asked |= wait
            return poll(wait=wait)

        monkeypatch.setattr(background(trainer), "poll", asked_while_waiting)
        assert trainer.run(interrupt) == launch.EXIT_INTERRUPTED
    assert trainer.step == 7 and checkpoint.read_state(tmp_path / "run", 7)["refresh"]["step"] == 5
    assert trainer.upkeep.waited_s > 0
    assert train(made)["lines"] == undisturbed[1]["lines"]


def test_its_failure_ends_training_with_a_reason(factbook_dir: Path, tmp_path: Path):
    trainer = opened(settings(factbook_dir, tmp_path / "run", **RUN))
    for _ in range(6):
        trainer.train_step()
    job(trainer).kill()
    with pytest.raises(RefreshError, match=r"weights of step 5 .* was ended by signal 9: .*run the same command"):
        while True:
            trainer.train_step()
    trainer.upkeep.close()


def test_a_snapshot_that_is_not_what_was_written_is_refused(
    factbook_dir: Path, tmp_path: Path, undisturbed: tuple[Path, dict[str, Any]]
):
    cut_back(undisturbed[0], tmp_path / "run", 6)
    (part,) = (tmp_path / "run" / "refresh" / "step-5").glob("*.safetensors")
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    trainer = Trainer(settings(factbook_dir, tmp_path / "run", **RUN))
    with pytest.raises(ValueError, match="has changed since it was written"):
        trainer.resume()


def test_when_ready_adopts_at_the_first_step_that_finds_it(factbook_dir: Path, tmp_path: Path):
    trainer = opened(settings(factbook_dir, tmp_path / "run", **{**RUN, "index": {**ASYNC, "adopt": "when_ready"}}))
    for _ in range(6):
        trainer.train_step()
    assert trainer.memory.version == 2
    assert job(trainer).wait(timeout=200) == 0
    assert trainer.train_step()["index_version"] == 5  # one step after it began
    trainer.upkeep.close()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(), ("--parallel.pipeline_stages", "2")])
def test_killed_within_a_refresh(factbook_dir: Path, tmp_path: Path, ranks: tuple[str, ...]):
    """kill -9 of a launched run: its background process dies with it, and the resumed run is the undisturbed one."""
    options = (
        "--train.steps", "16", "--index.refresh", "async", "--index.refresh_every_n_steps", "5",
        "--index.refresh_lag", "4", "--checkpoint.every_n_steps", "1", *ranks,
    )  # fmt: skip
    whole = subprocess.run(command(factbook_dir, tmp_path / "whole", *options), cwd=ROOT, timeout=280)
    assert whole.returncode == 0
    killed = tmp_path / "killed"
    plan = ("--parallel.plan", str(tmp_path / "whole" / "plan.json"))
    process = subprocess.Popen(command(factbook_dir, killed, *options, *plan), cwd=ROOT)
    deadline = time.monotonic() + 250
    below: set[int] = set()
    while not (killed / "refresh" / "step-7").exists() or not pending(killed):
        assert process.poll() is None and time.monotonic() < deadline
        below |= children(process.pid)
        time.sleep(0.01)
    below |= children(process.pid)
    assert any(b"retriever.reembed" in line for line in map(command_line, below))
    process.kill()
    process.wait()
    while any(map(command_line, below)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    again = subprocess.run(command(factbook_dir, killed, *options, *plan), cwd=ROOT, timeout=280)
    assert again.returncode == 0
    assert metrics(killed) == metrics(tmp_path / "whole")


def pending(run: Path) -> bool:
    """Whether the newest checkpoint names a refresh that is under way."""
    steps = checkpoint.list_steps(run)
    return bool(steps) and checkpoint.read_state(run, steps[-1])["refresh"] is not None


def command_line(pid: int) -> bytes:
    """Empty once the process is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
