"""The short form of the torture: a few kills, nothing lost; and what it would say if something were."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.reliability import victims
from benchmarks.reliability.torture import Torture, session


def test_a_few_kills_lose_nothing(factbook_dir: Path, tmp_path: Path):
    found = session(tmp_path, factbook_dir, launched=0, forked=3, conversions=1, minutes=3, steps=10, seed=1)
    assert found.faults == []
    assert sum(found.kills.values()) >= 4 and found.finished >= 2


@pytest.mark.slow
def test_kills_amid_refreshes_beside_the_steps_lose_nothing(factbook_dir: Path, tmp_path: Path):
    found = session(
        tmp_path, factbook_dir, launched=0, forked=4, conversions=0, minutes=8, steps=30, seed=3, share_async=1.0
    )
    assert found.faults == [] and sum(found.kills.values()) >= 4
    assert all("async" in name for name in found.kills)


def test_processes_that_are_left_are_found(tmp_path: Path):
    process = subprocess.Popen(["sleep", "100", str(tmp_path / "run" / "index")], stderr=subprocess.DEVNULL)
    process.kill()
    process.wait()
    assert victims.left_of(tmp_path / "run", limit_s=0) == []
    script = "import sys; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, str(tmp_path / "run" / "index")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        (left,) = victims.left_of(tmp_path / "run", limit_s=0)
        assert str(tmp_path / "run" / "index") in left and victims.left_of(tmp_path / "ru", limit_s=0) == []
    assert victims.left_of(tmp_path / "run", limit_s=0) == []


@pytest.mark.parametrize(
    "damage, fault",
    [
        (lambda lines: lines[:4] + lines[5:], "steps [1, 2, 3, 4, 6"),
        (lambda lines: lines + lines[-1:], "11, 12, 12]"),
        (lambda lines: [line.replace('"data_digest": "', '"data_digest": "x') for line in lines], "data_digest"),
    ],
)
def test_a_lost_a_doubled_and_another_sample_are_found(undisturbed: Torture, damage, fault: str):
    run = undisturbed.folder / "undisturbed"
    copy = undisturbed.folder / "damaged"
    copy.mkdir(exist_ok=True)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (copy / "metrics.jsonl").write_text("\n".join(damage(lines)) + "\n")
    undisturbed.found.faults.clear()
    undisturbed._compare(copy)
    assert fault in undisturbed.found.faults[0]


@pytest.fixture(scope="module")
def undisturbed(factbook_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Torture:
    return Torture(tmp_path_factory.mktemp("torture"), factbook_dir, steps=12, seed=0)


def test_an_unreadable_state_is_found(undisturbed: Torture):
    run = undisturbed.folder / "undisturbed"
    undisturbed.found.faults.clear()
    undisturbed._check_readable(run)
    assert undisturbed.found.faults == []
    state = run / "checkpoints" / "step-12" / "state.json"
    whole = state.read_text()
    state.write_text(whole.replace(json.loads(whole)["checksum"], "0" * 64))
    undisturbed._check_readable(run)
    assert "STEP 12 IS NOT USED" in undisturbed.found.faults[0]
    state.write_text(whole)
