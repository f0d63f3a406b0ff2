"""The planning command on a model of the tests; user mistakes give one sentence and status 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline import BlockProgram, Plan
from pipeline.config import ParallelConfig
from pipeline.plan import main
from tests.pipeline.fid_program import fid_batch, fid_program

SEEN: list[list[str]] = []


def factory(config: str, overrides: list[str]) -> tuple[BlockProgram, dict[str, Any], ParallelConfig]:
    SEEN.append(overrides)
    plan = overrides[overrides.index("--parallel.plan") + 1] if "--parallel.plan" in overrides else ""
    return fid_program(), fid_batch(), ParallelConfig(pipeline_stages=2, num_microbatches=3, plan=plan)


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text("program: tests.pipeline.test_plan:factory\n")
    return str(path)


def test_json_has_the_contract_s_keys_and_the_trace_opens(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace_file = tmp_path / "trace.json"
    assert main(["--config", config, "--json", "--trace", str(trace_file), "--train.steps", "3"]) == 0
    assert SEEN[-1] == ["--train.steps", "3"]
    data = json.loads(capsys.readouterr().out)
    assert list(data) == ["stages", "schedule", "num_microbatches", "step_s", "bubble"]
    for stage in data["stages"]:
        assert list(stage) == ["blocks", "forward_s", "backward_s", "memory_bytes", "send_bytes"]
    assert [b for s in data["stages"] for b in s["blocks"]] == [b.name for b in fid_program().blocks]
    events = json.loads(trace_file.read_text())["traceEvents"]
    assert sum(e["name"].startswith("forward") for e in events) == 2 * 3


def test_table_and_options(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", config, "--stages", "3", "--microbatches", "6"]) == 0
    out = capsys.readouterr().out
    assert "3 stages, 1f1b, 6 micro-batches" in out and "bubble" in out and "warning" not in out


def test_a_plan_can_be_handed_back(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(Plan.from_cuts(fid_program(), [5], schedule="gpipe", num_microbatches=2).to_json())
    assert main(["--config", config, "--json", "--parallel.plan", str(path)]) == 0
    assert len(json.loads(capsys.readouterr().out)["stages"][0]["blocks"]) == 5
    path.write_text(path.read_text().replace("encoder.1", "encoder.9"))
    assert main(["--config", config, "--parallel.plan", str(path)]) == 2
    assert "encoder.9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stages", "7", "--microbatches", "6"], "7 stages"),
        (["--stages", "0"], "parallel.pipeline_stages is 0"),
        (["--microbatches", "4"], "does not divide"),
        (["--stagse", "2"], "did you mean 'stages'"),
        (["stray"], "stray"),
        (["--trace", "/no/such/folder/x"], "--trace"),
        (["--cluster", "CLUSTER"], "did you mean 'link_latency_s'"),
    ],
)
def test_mistakes(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("link_latency: 1\n")
    arguments = [str(cluster) if a == "CLUSTER" else a for a in arguments]
    assert main(["--config", config, *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err and len(err.splitlines()) == 1


def test_bad_configurations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    assert main(["--config", str(path)]) == 2
    for text, words in (
        ("program: nothing", "package.module:function"),
        ("program: no.such:f", "cannot be imported"),
        ("- 1", "mapping"),
        ("a: [", "YAML"),
    ):
        path.write_text(text)
        assert main(["--config", str(path)]) == 2
        assert words in capsys.readouterr().err.splitlines()[-1]
