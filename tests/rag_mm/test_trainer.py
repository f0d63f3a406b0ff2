"""Whole runs through ``train.py``: layouts agree, runs repeat, resume is exact, mistakes get one sentence."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rag_mm import checkpoint

ROOT = Path(__file__).parents[2]
TIMES = ("samples_per_s", "time_s", "peak_memory_bytes")


def command(data: Path, run: Path, *options: str) -> list[str]:
    small = (
        "--data.dir", str(data), "--run-dir", str(run), "--reader.width", "16", "--reader.heads", "2",
        "--reader.ffn_width", "24", "--reader.encoder_layers", "1", "--reader.dropout", "0.1",
        "--objectives.pdist", "0.5", "--train.batch_size", "8", "--train.pair_batch_size", "8",
        "--train.retriever_share", "0.15", "--train.distill_share", "0.1",
        "--index.refresh_every_n_steps", "5", "--checkpoint.every_n_steps", "6",
    )  # fmt: skip
    return [sys.executable, "-W", "ignore", str(ROOT / "train.py"), *small, *options]


def train(data: Path, run: Path, *options: str) -> list[dict[str, Any]]:
    """Run to the end; the lines of metrics without what clocks and memory say."""
    done = subprocess.run(command(data, run, *options), cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return metrics(run)


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


@pytest.fixture(scope="module")
def undisturbed(factbook_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    run = tmp_path_factory.mktemp("runs") / "one"
    return run, train(factbook_dir, run, "--train.steps", "20")


def test_a_run_explains_itself(undisturbed: tuple[Path, list[dict[str, Any]]]):
    run, lines = undisturbed
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert {p.name for p in run.iterdir()} >= {
        "config.yaml",
        "plan.json",
        "metrics.jsonl",
        "events",
        "index",
        "checkpoints",
        "timeline.png",
    }
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert set(last["losses"]) == {"generation", "pdist", "contrastive"}
    assert set(last["time_s"]) >= {"retrieve", "fetch", "forward_backward", "update"}
    assert 0 <= last["hit_at_k"] <= 1 and last["peak_memory_bytes"][0] > 10**8
    assert last["index_version"] == 18 and checkpoint.list_steps(run) == [18, 20]
    reading = lines[3:]  # what shows a collapse is there in each step, and is a number
    shown = [line["score_entropy"] for line in reading] + [line["score_margin"] for line in reading]
    shown += [line["hit_at_k"] for line in reading] + [e for line in reading for e in line["entropies"].values()]
    shown += [line["contrastive"][what] for line in lines for what in ("margin", "accuracy")]
    shown += [line["dev_hit_at_k"] for line in lines if line["step"] in (4, 9, 14, 19)]
    shown += [line["staleness"]["changed_at_refresh"] for line in lines[8:]]
    assert all(math.isfinite(number) for number in shown)
    assert set(last["entropies"]) == {"pdist/target", "pdist/score"}


@pytest.mark.parametrize(
    ("options", "num_stages"),
    [
        ((), 2),
        pytest.param(("--parallel.towers", "piped"), 2, marks=pytest.mark.slow),
        pytest.param(("--reader.vision", "once"), 2, marks=pytest.mark.slow),
        pytest.param(("--reader.vision", "grouped"), 2, marks=pytest.mark.slow),
        (("--parallel.schedule", "interleaved", "--parallel.chunks", "2"), 4),
    ],
    ids=["1f1b", "piped-towers", "vision-once", "vision-grouped", "interleaved"],
)
def test_two_ranks_follow_one(
    factbook_dir: Path,
    tmp_path: Path,
    undisturbed: tuple[Path, list[dict[str, Any]]],
    options: tuple[str, ...],
    num_stages: int,
):
    """The promise of the whole framework, on a trajectory: 20 steps, within 1e-4."""
    ranks = ("--parallel.pipeline_stages", "2", *options)
    one, two = undisturbed[1], train(factbook_dir, tmp_path, "--train.steps", "20", *ranks)
    for a, b in zip(one, two, strict=True):
        assert (a["data_digest"], a["retrieved_digest"]) == (b["data_digest"], b["retrieved_digest"])
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)
    assert len(json.loads((tmp_path / "plan.json").read_text())["stages"]) == num_stages
    if "piped" in options:  # and what it wrote is read by a run that deals the towers out
        (tmp_path / "checkpoints" / "step-20").rename(tmp_path / "aside")
        resumed = train(factbook_dir, tmp_path, "--train.steps", "20")
        assert resumed[-1]["loss"] == pytest.approx(one[-1]["loss"], rel=1e-4)


def test_killed_and_resumed_is_the_same_run_bit_for_bit(
    factbook_dir: Path, tmp_path: Path, undisturbed: tuple[Path, list[dict[str, Any]]]
):
    plan = str(undisturbed[0] / "plan.json")
    process = subprocess.Popen(
        command(factbook_dir, tmp_path, "--train.steps", "20", "--parallel.plan", plan), cwd=ROOT
    )
    deadline = time.monotonic() + 200
    while len(checkpoint.list_steps(tmp_path)) < 2 or len(metrics(tmp_path)) < 13:  # past a checkpoint, between two
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert train(factbook_dir, tmp_path, "--train.steps", "20", "--parallel.plan", plan) == undisturbed[1]


def test_terminated_on_two_stages_resumes_on_one_and_on_two(
    factbook_dir: Path, tmp_path: Path, undisturbed: tuple[Path, list[dict[str, Any]]]
):
    run, copy, two = tmp_path / "run", tmp_path / "copy", ("--parallel.pipeline_stages", "2")
    process = subprocess.Popen(command(factbook_dir, run, "--train.steps", "20", *two), cwd=ROOT)
    deadline = time.monotonic() + 200
    while not (run / "metrics.jsonl").exists() or len(metrics(run)) < 8:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=100) == 75
    (step,) = checkpoint.list_steps(run)[-1:]
    assert step == len(metrics(run)) < 20
    shutil.copytree(run, copy)
    for lines in (
        train(factbook_dir, run, "--train.steps", "20"),
        train(factbook_dir, copy, "--train.steps", "20", *two),
    ):
        for a, b in zip(undisturbed[1], lines, strict=True):
            assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_rank_died(factbook_dir: Path, tmp_path: Path):
    options = ("--train.steps", "20", "--parallel.pipeline_stages", "2")
    right = train(factbook_dir, tmp_path / "right", *options)
    argv = command(factbook_dir, tmp_path / "run", *options, "--parallel.plan", str(tmp_path / "right" / "plan.json"))
    torchrun = [
        sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "--max-restarts", "2", *argv[3:],
    ]  # fmt: skip
    process = subprocess.Popen(torchrun, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while not checkpoint.list_steps(tmp_path / "run"):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0 and "resumed from step 6" in said, said
    assert metrics(tmp_path / "run") == right


def test_steps_that_are_not_finite_are_written_down_and_end_the_run(factbook_dir: Path, tmp_path: Path):
    options = (
        "--train.steps", "20", "--train.learning_rate", "1e30", "--train.max_bad_steps", "3",
        "--checkpoint.every_n_steps", "0",
    )  # fmt: skip
    done = subprocess.run(
        command(factbook_dir, tmp_path, *options), cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1 and "3 steps in a row were not taken" in done.stderr
    lines, bad = metrics(tmp_path), [json.loads(x) for x in (tmp_path / "bad_steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in bad] == [line["step"] for line in lines[-3:]]
    assert all(len(line["sample_ids"]) == 8 and "not finite" in line["reason"] for line in bad)
    assert lines[-1]["skipped_steps"] == 3


def test_a_run_folder_is_held_by_one_and_ranks_end_with_their_launcher(factbook_dir: Path, tmp_path: Path):
    run, two = tmp_path / "run", ("--parallel.pipeline_stages", "2")
    launcher = subprocess.Popen(command(factbook_dir, run, "--train.steps", "2000", *two), cwd=ROOT)
    deadline = time.monotonic() + 200
    while not (run / "metrics.jsonl").exists() or len(metrics(run)) < 2:
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    holder = int((run / ".lock").read_text())
    second = subprocess.run(
        command(factbook_dir, run, "--train.steps", "2000"), cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert second.returncode == 2 and f"is in use by process {holder}" in second.stderr
    launcher.kill()
    launcher.wait()
    while Path(f"/proc/{holder}").exists():  # it finishes its step, writes a checkpoint and goes
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert checkpoint.list_steps(run)[-1] == len(metrics(run))


MISTAKES = [
    (("--retriever.k", "100000"), "retriever.k is 100000; the memory holds"),
    (("--reader.widht", "8"), "--reader.width"),
    (("--data.dir", "nowhere"), "python -m data.prepare factbook --out nowhere"),
    (("--parallel.pipeline_stages", "40", "--parallel.num_microbatches", "1"), "fewer than the 40 stages"),
    (("--parallel.plan", "no.json"), "no.json"),
    (("--train.steps", "many"), "train.steps"),
]


@pytest.mark.parametrize("options, sentence", MISTAKES)
def test_mistakes_get_one_sentence_and_status_2(
    factbook_dir: Path, tmp_path: Path, options: tuple[str, ...], sentence: str
):
    done = subprocess.run(
        command(factbook_dir, tmp_path, *options), cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and sentence in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_more_stages_than_blocks_is_said_once(factbook_dir: Path, tmp_path: Path):
    options = (
        "--parallel.pipeline_stages",
        "8",
        "--parallel.num_microbatches",
        "8",
        "--parallel.verify",
        "off",
    )
    done = subprocess.run(
        command(factbook_dir, tmp_path, *options), cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 2 and "stages" in done.stderr and "Traceback" not in done.stderr


def test_another_configuration_on_the_same_folder_is_refused(
    factbook_dir: Path, undisturbed: tuple[Path, list[dict[str, Any]]]
):
    run, _ = undisturbed
    done = subprocess.run(
        command(factbook_dir, run, "--train.steps", "20", "--train.seed", "5"),
        cwd=ROOT, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 2 and "train.seed is 5" in done.stderr and "another --run-dir" in done.stderr
