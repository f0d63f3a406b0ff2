"""Evaluation on ranks: the files of one process byte for byte, the weights of one's own stages and no others."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rag_mm.evaluate.answer import Answerer, Interrupted, load_run
from rag_mm.evaluate.decoding import DecodingConfig
from rag_mm.evaluate.evaluation import evaluate_run
from rag_mm.evaluate.layout import LayoutConfig
from rag_mm.evaluate.questions import QuestionsConfig
from tests.distributed import run_on_ranks
from tests.rag_mm.evaluate.conftest import save_lively, small_config, with_fusion

ROWS = ["most_frequent", "gold_document", "joint"]
TASK = QuestionsConfig("test", 40)
STEM = f"eval/{TASK.name}"
LAYOUTS = {
    "2 stages": LayoutConfig(pipeline_stages=2),
    "2 replicas": LayoutConfig(data_replicas=2),
    "3 stages, piped": LayoutConfig(pipeline_stages=3, towers="piped"),
    "2 replicas x 2 stages, piped": LayoutConfig(pipeline_stages=2, data_replicas=2, towers="piped"),
}


@dataclass(frozen=True)
class Reference:
    """A run and what one process makes of it, five questions at a time."""

    run_dir: Path
    whole: dict[str, Any]
    files: tuple[bytes, bytes]


def make_reference(factbook_dir: Path, run_dir: Path, fusion: str) -> Reference:
    save_lively(with_fusion(small_config(factbook_dir, run_dir), fusion))
    whole = evaluate(run_dir, LayoutConfig(), DecodingConfig(batch_size=5))
    return Reference(run_dir, whole, files(run_dir))


@pytest.fixture(scope="module")
def fid(factbook_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(factbook_dir, tmp_path_factory.mktemp("lively") / "fid", "fid")


@pytest.fixture(scope="module")
def prepend(factbook_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(factbook_dir, tmp_path_factory.mktemp("lively") / "prepend", "prepend")


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest) -> None:
    """Every test evaluates anew, index included."""
    for name in {"prepend", "fid"} & set(request.fixturenames):
        for made in ("eval", "index-eval"):
            shutil.rmtree(request.getfixturevalue(name).run_dir / made, ignore_errors=True)


def files(run_dir: Path) -> tuple[bytes, bytes]:
    return (run_dir / f"{STEM}.json").read_bytes(), (run_dir / f"{STEM}.predictions.jsonl").read_bytes()


def evaluate(run_dir: Path, parallel: LayoutConfig, decoding: DecodingConfig) -> dict[str, Any]:
    run = load_run(run_dir, parallel=parallel)
    evaluated = evaluate_run(run, ROWS, TASK, console=Console(quiet=True), decoding=decoding)
    reader, encoder = run.model.reader, run.model.encoder
    held = {n: p.numel() for n, p in reader.named_parameters_global().items() if not p.is_meta}
    return {
        "answers": [item.prediction.answer for item in evaluated.scored["joint"]],
        "here": set(run.layout.reader.parameters_here),
        "held": held,
        "encoder": {n for n, p in encoder.named_parameters() if not p.is_meta},
    }


def check(reference: Reference, name: str) -> None:
    parallel, whole = LAYOUTS[name], reference.whole
    assert len(set(whole["answers"])) > 10, "different questions get different answers"
    ranks = run_on_ranks(evaluate, parallel.num_ranks, reference.run_dir, parallel, DecodingConfig(batch_size=16))
    assert files(reference.run_dir) == reference.files
    assert not list((reference.run_dir / "eval").glob(".*unfinished*"))
    for rank in ranks:
        assert rank["answers"] == whole["answers"]
        assert set(rank["held"]) == rank["here"], "a rank holds the parameters of its own stages and no others"
    for replica in range(parallel.data_replicas):
        stages = ranks[replica * parallel.pipeline_stages : (replica + 1) * parallel.pipeline_stages]
        assert set().union(*(rank["held"] for rank in stages)) == set(whole["held"])
        if len(stages) > 1:
            assert max(sum(rank["held"].values()) for rank in stages) < sum(whole["held"].values())
        assert set().union(*(rank["encoder"] for rank in stages)) == whole["encoder"]
        if parallel.towers == "piped":
            assert all(rank["encoder"] < whole["encoder"] for rank in stages)


@pytest.mark.parametrize("name", ["2 replicas", "3 stages, piped"])
def test_every_layout_writes_the_files_of_one_process(fid: Reference, name: str) -> None:
    """The index is built by the layout, too; one process reads five questions at once, the ranks sixteen."""
    check(fid, name)


def test_the_prepend_reader_too(prepend: Reference) -> None:
    check(prepend, "2 stages")


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_with_either_reader(fid: Reference, prepend: Reference, name: str) -> None:
    for reference in (fid, prepend):
        for made in ("eval", "index-eval"):
            shutil.rmtree(reference.run_dir / made, ignore_errors=True)
        check(reference, name)


def test_what_was_done_is_not_done_again(fid: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after three batches, then stopped by a kill in the middle of a line, then on."""
    decoding, run_dir = DecodingConfig(batch_size=4), fid.run_dir
    asked = iter([False, False, True])
    with pytest.raises(Interrupted, match="12 answers are safe"):
        evaluate_run(
            load_run(run_dir),
            ROWS,
            TASK,
            console=Console(quiet=True),
            decoding=decoding,
            interrupt=lambda: next(asked),
        )
    (path,) = (run_dir / "eval" / f".{TASK.name}.unfinished").glob("*.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 12
    path.write_bytes(b"".join(lines[:10]) + lines[10][:20])
    decoded: list[str] = []
    decode = Answerer._decode
    monkeypatch.setattr(
        Answerer, "_decode", lambda self, samples, *rest: decoded.extend(s.id for s in samples) or decode(
            self, samples, *rest
        )
    )  # fmt: skip
    evaluate(run_dir, LayoutConfig(), decoding)
    assert files(run_dir) == fid.files
    done = [line.split(b'"id": "')[1].split(b'"')[0].decode() for line in lines[:8]]  # two whole batches
    assert len(decoded) == 2 * TASK.num - 8
    gold_row = decoded[: TASK.num - 8]
    assert not set(done) & set(gold_row)


def test_answers_of_another_decoding_are_not_taken(fid: Reference, capsys: pytest.CaptureFixture[str]) -> None:
    for decoding, said in ((DecodingConfig(), ""), (DecodingConfig("beam", num_beams=2), "decoding was")):
        with pytest.raises(Interrupted):
            evaluate_run(
                load_run(fid.run_dir), ["gold_document"], TASK, console=Console(soft_wrap=True), decoding=decoding,
                interrupt=lambda: True,
            )  # fmt: skip
        assert said in capsys.readouterr().out.replace("\n", " ")


def command(run_dir: Path, *options: str) -> list[str]:
    arguments = ["--run-dir", str(run_dir), "--num", str(TASK.num), "--rows", ",".join(ROWS), *options]
    return [sys.executable, "-m", "rag_mm.evaluate", *arguments]


def wait_for_lines(launcher: subprocess.Popen[str], folder: Path, count: int) -> None:
    """Until so many predictions are kept."""
    end = time.monotonic() + 300
    while sum(path.read_bytes().count(b"\n") for path in folder.glob("*.jsonl")) < count:
        if launcher.poll() is not None or time.monotonic() > end:
            launcher.kill()
            raise AssertionError(f"it ended before it could be stopped, with status {launcher.poll()}")
        time.sleep(0.002)


def test_ranks_killed_in_the_middle_lose_nothing(fid: Reference) -> None:
    """Two real ranks, one of them killed with signal 9; one process goes on and writes what it would have written."""
    run_dir = fid.run_dir
    options = ("--parallel.data_replicas", "2", "--evaluate.batch_size", "1")
    launcher = subprocess.Popen(command(run_dir, *options), stderr=subprocess.PIPE, text=True)
    folder = run_dir / "eval" / f".{TASK.name}.unfinished"
    wait_for_lines(launcher, folder, 6)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    subprocess.run(["kill", "-9", children[1]], check=True)
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 1 and "was ended by SIGKILL" in said
    kept = sum(path.read_bytes().count(b"\n") for path in folder.glob("*.jsonl"))
    assert 6 <= kept < 2 * TASK.num
    evaluate(run_dir, LayoutConfig(), DecodingConfig())
    assert files(run_dir) == fid.files


@pytest.mark.slow
def test_torchrun_and_an_interruption(fid: Reference) -> None:
    """SIGTERM to our launcher: status 75 and a sentence; torchrun goes on, on another layout."""
    run_dir = fid.run_dir
    options = ("--parallel.pipeline_stages", "2", "--evaluate.batch_size", "1")
    launcher = subprocess.Popen(command(run_dir, *options), stderr=subprocess.PIPE, text=True)
    wait_for_lines(launcher, run_dir / "eval" / f".{TASK.name}.unfinished", 1)
    launcher.terminate()
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 75 and "answers are safe, run the same command to go on" in said
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
    done = subprocess.run(
        [*torchrun, *command(run_dir, "--parallel.data_replicas", "2")[2:]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert files(run_dir) == fid.files
