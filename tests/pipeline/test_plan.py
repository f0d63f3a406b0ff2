"""The planning command on a model of the tests; user mistakes give one sentence and status 2."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from pipeline import BlockProgram, Plan
from pipeline.config import ParallelConfig
from pipeline.costs import Beside
from pipeline.plan import main
from pipeline.trace_bar import trace_bar
from tests.pipeline.fid_program import fid_batch, fid_program

SEEN: list[list[str]] = []
PROGRAM = ["--program", "tests.pipeline.test_plan:factory"]


def factory(config: str, overrides: list[str]) -> tuple[BlockProgram, dict[str, Any], ParallelConfig]:
    """Two stages of the tests' program; understands the overrides ``--parallel.<text or number>``."""
    SEEN.append(overrides)
    fields: dict[str, Any] = {"pipeline_stages": 2, "num_microbatches": 3}
    for flag, text in zip(overrides[::2], overrides[1::2], strict=True):
        if flag.startswith("--parallel."):
            name = flag.removeprefix("--parallel.")
            fields[name] = yaml.safe_load(text)
    return fid_program(), fid_batch(), ParallelConfig(**fields)


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes would cost seconds a test."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text("train:\n  steps: 1\n")
    return str(path)


def test_json_has_the_contract_s_keys_and_the_trace_opens(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace_file = tmp_path / "trace.json"
    arguments = ["--config", config, *PROGRAM, "--json", "--trace", str(trace_file), "--train.steps", "3"]
    assert main(arguments) == 0
    assert SEEN[-1] == ["--train.steps", "3"]
    data = json.loads(capsys.readouterr().out)
    assert list(data)[:5] == ["stages", "schedule", "num_microbatches", "step_s", "bubble"]
    for stage in data["stages"]:
        assert list(stage) == ["blocks", "forward_s", "backward_s", "memory_bytes", "send_bytes", "return_bytes"]
    assert [b for s in data["stages"] for b in s["blocks"]] == [b.name for b in fid_program().blocks]
    events = json.loads(trace_file.read_text())["traceEvents"]
    assert sum(e["name"].startswith("forward") for e in events) == 2 * 3


def test_tables_options_and_picture(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "step.svg"
    arguments = ["--stages", "3", "--microbatches", "6", "--timeline", str(picture)]
    assert main(["--config", config, *PROGRAM, *arguments]) == 0
    out = capsys.readouterr().out
    assert "3 stages, 1f1b, 6 micro-batches" in out and "bubble" in out and "warning" not in out
    assert "equal blocks" in out and "equal parameters" in out
    lines = [
        line for line in out.splitlines() if line.startswith("traced in one process of 3, as many as this machine")
    ]
    assert len(lines) == 1
    assert "<svg" in picture.read_text()


def test_interleaved_pins_and_cluster(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("link_latency_s: 1.0e-4\nlink_bytes_per_s: 1.0e+9\n")
    overrides = ["--parallel.schedule", "interleaved", "--parallel.chunks", "2", "--parallel.pins", "[target]"]
    arguments = ["--config", config, *PROGRAM, *overrides, "--cluster", str(cluster)]
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (len(data["stages"]), data["num_ranks"], data["schedule"]) == (4, 2, "interleaved")
    assert "target" in [stage["blocks"][0] for stage in data["stages"]]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "4 stages on 2 ranks" in out and "tied over ranks" in out
    assert main([*arguments[:-2], "--parallel.pins", "[targte]"]) == 2
    assert "did you mean 'target'" in capsys.readouterr().err


def test_a_described_device_needs_no_values(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("device: h100\nlink_bytes_per_s: 1.0e+9\n")
    assert main(["--config", config, *PROGRAM, "--cluster", str(cluster)]) == 0
    out = capsys.readouterr().out
    assert "traced in one process" not in out
    assert "times are predicted for h100" in out and "tied over ranks" in out  # ties survive the meta device


def test_a_trace_is_kept(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--config", config, *PROGRAM, "--json", "--cache", str(tmp_path / "a" / "traces")]
    assert main(arguments) == 0
    first = capsys.readouterr().out

    def measure(*_: Any, **__: Any) -> None:
        raise AssertionError("traced again")

    monkeypatch.setattr(sys.modules["pipeline.trace"], "_trace", measure)
    assert main(arguments) == 0
    assert capsys.readouterr().out == first
    with pytest.raises(AssertionError, match="traced again"):
        main([*arguments, "--microbatches", "6"])
    assert main([*arguments[:-1], config]) == 2
    assert f"--cache {config}: File exists" in capsys.readouterr().err


def test_a_busy_trace_and_one_by_itself_are_kept_apart_and_said(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = []

    class Busy:
        def __init__(self, factory: Any, *, count: int, lineage_samples: int) -> None:
            program, _, num_microbatches = factory()
            entered.append((len(program.blocks), num_microbatches, count))

        def __enter__(self) -> None:
            entered.append("busy")

        def __exit__(self, *_: object) -> None:
            entered.append("done")

    monkeypatch.setattr("pipeline.plan.BusyRanks", Busy)
    cache = tmp_path / "traces"
    arguments = ["--config", config, *PROGRAM, "--parallel.trace_cache", str(cache)]
    assert main(arguments) == 0
    assert "traced in one process of 2" in capsys.readouterr().out and entered == []
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    for _ in range(2):  # read from the cache the second time, with nothing entered
        assert main(arguments) == 0
        assert "traced with 2 ranks busy at once\n" in capsys.readouterr().out
    assert entered == [(6, 3, 1), "busy", "done", (6, 3, 1)]
    assert main([*arguments, "--parallel.data_replicas", "2"]) == 0
    assert "traced with 3 ranks busy at once of 4, as many as this machine has cores for" in capsys.readouterr().out
    devices = [json.loads(path.read_text())["device"] for path in cache.iterdir()]
    assert sorted(device.rpartition("threads")[2] for device in devices) == [
        "", ", 2 ranks at once", ", 3 ranks at once"
    ]  # fmt: skip


def test_what_ranks_hold_beside_their_stages_counts_for_the_capacity(
    config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--config", config, "--program", "tests.pipeline.test_plan:with_towers", "--parallel.trace_cache"]
    arguments += [str(tmp_path), "--parallel.capacity_bytes"]
    assert main([*arguments, "1"]) == 2
    err = capsys.readouterr().err
    assert "of which up to 1000000 are taken beside the pipeline" in err
    smallest = int(err.partition("would do is ")[2].split()[0])
    assert smallest > 1_000_000 and main([*arguments, str(smallest)]) == 0
    assert main([*arguments, str(smallest - 1)]) == 2


def with_towers(config: str, overrides: list[str]) -> tuple[Any, ...]:
    return *factory(config, overrides), lambda parallel: [Beside(1_000_000)] * parallel.pipeline_stages


def test_the_bar_of_a_trace() -> None:
    out = io.StringIO()
    with trace_bar(Console(file=out, force_terminal=True, width=100)) as progress:
        progress(1, 3, "encoder.0")
        progress(3, 3, "traced")
    assert "1/3" in out.getvalue() and "encoder.0" in out.getvalue() and "3/3" in out.getvalue()
    out = io.StringIO()
    with trace_bar(Console(file=out)) as progress:
        progress(0, 3, "not cached: [x] is not known")
        progress(1, 3, "encoder.0")
    assert out.getvalue() == "trace not cached: [x] is not known\n"


def test_capacity_that_no_plan_meets(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", config, *PROGRAM, "--parallel.capacity_bytes", "10"]) == 2
    assert "the smallest capacity that would do is" in capsys.readouterr().err


def test_a_plan_can_be_handed_back(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(Plan.from_cuts(fid_program(), [5], schedule="gpipe", num_microbatches=2).to_json())
    assert main(["--config", config, *PROGRAM, "--json", "--parallel.plan", str(path)]) == 0
    assert len(json.loads(capsys.readouterr().out)["stages"][0]["blocks"]) == 5
    path.write_text(path.read_text().replace("encoder.1", "encoder.9"))
    assert main(["--config", config, *PROGRAM, "--parallel.plan", str(path)]) == 2
    assert "encoder.9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stages", "7", "--parallel.schedule", "gpipe"], "7 stages are more than the program's 6 blocks; use fewer"),
        (["--stages", "4"], "parallel.num_microbatches is 3, fewer than the 4 stages"),
        (
            ["--parallel.pins", "[decoder.7]"],
            "parallel.pins names unknown block 'decoder.7' (did you mean 'decoder.0'?)",
        ),
        (
            ["--stages", "2", "--parallel.pins", "[encoder.0, head]"],
            "2 pinned cuts need 3 stages, but num_stages is 2; pin fewer",
        ),
        (["--stages", "0"], "parallel.pipeline_stages is 0"),
        (["--microbatches", "4"], "6 samples does not divide into 4 micro-batches; use one of 1, 2, 3, 6"),
        (["--stagse", "2"], "did you mean 'stages'"),
        (["stray"], "stray"),
        (["--trace", "/no/such/folder/x"], "--trace"),
        (["--timeline", "step.pdf"], "allowed: .png, .svg, .json"),
        (["--program", "nothing"], "package.module:function"),
        (["--program", "no.such:f"], "cannot be imported"),
        (["--config", "no.yaml"], "no.yaml: no such file"),
        (["--cluster", "CLUSTER"], "did you mean 'link_latency_s'"),
    ],
)
def test_mistakes(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("link_latency: 1\n")
    arguments = [str(cluster) if a == "CLUSTER" else a for a in arguments]
    assert main(["--config", config, *PROGRAM, *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err and len(err.splitlines()) == 1


def test_a_given_plan_is_shown_with_the_times_of_its_own_cuts(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config", config, *PROGRAM, "--json"]
    assert main(arguments) == 0
    data = json.loads(capsys.readouterr().out)
    for stage in data["stages"]:
        stage["forward_s"] = 1e6
    given = tmp_path / "plan.json"
    given.write_text(json.dumps(data))
    assert main([*arguments, "--parallel.plan", str(given)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [s["blocks"] for s in shown["stages"]] == [s["blocks"] for s in data["stages"]]
    assert all(0 < stage["forward_s"] < 1e3 for stage in shown["stages"])


def test_what_needs_no_trace_is_said_before_it(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def traced(*_: Any, **__: Any) -> None:
        raise AssertionError("traced")

    monkeypatch.setattr("pipeline.plan.trace", traced)
    for arguments in (
        ["--parallel.pins", "[decoder.7]"],
        ["--stages", "9", "--microbatches", "9"],
        ["--timeline", "x.gif"],
    ):
        assert main(["--config", config, *PROGRAM, *arguments]) == 2
