"""The command's plan is one that training takes: both cut the same program, whatever ``reader.vision`` says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import Plan
from pipeline.plan import main
from rag_mm import planning, program
from rag_mm.program import for_planning
from rag_mm.vision_choice import MODES
from tests.rag_mm.joint_setup import READER

SMALL = (
    "--reader.width", str(READER.width), "--reader.heads", "2", "--reader.ffn_width", "24",
    "--reader.encoder_layers", "1", "--train.batch_size", "8", "--train.pair_batch_size", "8",
    "--parallel.pipeline_stages", "2", "--parallel.num_microbatches", "2",
)  # fmt: skip


def flags(data: Path, *more: str) -> list[str]:
    return ["--data.dir", str(data), *SMALL, *more]


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes would cost seconds a test."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(f"run_dir: {tmp_path / 'run'}\n")
    return str(path)


@pytest.mark.parametrize("vision", ["repeated", "grouped", "once"])
def test_the_command_cuts_what_training_cuts(
    factbook_dir: Path, tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str], vision: str
) -> None:
    given, options = tmp_path / "plan.json", flags(factbook_dir, "--reader.vision", vision)
    assert main(["--config", config, *options, "--json"]) == 0
    out, err = capsys.readouterr()
    names = [name for stage in json.loads(out)["stages"] for name in stage["blocks"]]
    assert (names[0] == "vision", "gather" in names) == (vision != "once", vision == "grouped")
    assert "piped" not in err
    given.write_text(out)
    for asked in (vision, "auto"):
        whole, batch, parallel, _ = for_planning(
            config, flags(factbook_dir, "--reader.vision", asked, "--parallel.plan", str(given))
        )
        Plan.from_json(Path(parallel.plan).read_text()).validate(whole)
        assert set(batch) >= set(whole.inputs)


def test_shared_pictures_are_for_one_number_of_micro_batches(
    factbook_dir: Path, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = flags(factbook_dir, "--reader.vision", "grouped")
    assert main(["--config", config, *options, "--microbatches", "4"]) == 2
    assert "give --parallel.num_microbatches instead" in capsys.readouterr().err


@pytest.mark.parametrize("mode", MODES)
def test_auto_is_decided_and_said_as_in_training(
    factbook_dir: Path, config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    ranks = []

    def choose(*_: object, num_ranks: int, **__: object) -> tuple[str, dict[str, float]]:
        ranks.append(num_ranks)
        return mode, dict.fromkeys(MODES, 1.0)

    monkeypatch.setattr(planning, "choose", choose)
    options = ("--reader.vision", "auto", "--parallel.towers", "piped", "--parallel.data_replicas", "2")
    reader, batch, *_ = program.for_planning(config, flags(factbook_dir, *options))
    names = [block.name for block in reader.blocks]
    assert ("vision" in names, "gather" in names) == (mode != "once", mode == "grouped")
    assert reader.num_samples(batch) == 4 and ranks == [4]
    err = capsys.readouterr().err
    assert f"so {mode}" in err and "parallel.towers piped" in err


def test_a_rank_imports_transformers_only_for_public_models():
    """It takes seconds, in each of the processes of a run."""
    program = "import rag_mm.entry, sys; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
