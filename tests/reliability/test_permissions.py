"""Permissions that are taken away while a run trains, and given back: nothing is lost, a sentence says what to do.

Root may write anywhere, so the runs are root's without the capabilities for that, and the test takes their folders
away by giving them to another user.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rag_mm import checkpoint
from rag_mm.metrics import read_metrics
from tests.reliability.small_runs import TWO, Run, start

pytestmark = pytest.mark.timeout(1200)  # whole runs, on a machine that may be busy
NOBODY = 65534
BOUND = ("setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner,-chown")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder in which runs are bound by permissions."""
    try:
        found = subprocess.run([*BOUND, "true"], capture_output=True, check=False).returncode
    except OSError:
        found = 1
    if found or os.getuid():
        pytest.skip("needs root and setpriv")
    return tmp_path


def begin(data: Path, folder: Path, *options: str) -> Run:
    return start(data, folder, *options, prefix=BOUND)


def take(folder: Path) -> None:
    os.chown(folder, NOBODY, NOBODY)
    folder.chmod(0o755)


def give_back(folder: Path) -> None:
    os.chown(folder, 0, 0)


@pytest.mark.slow
def test_checkpoints_that_may_not_be_written_for_a_while(factbook_dir: Path, place: Path):
    run = begin(factbook_dir, place / "run", *TWO, "--train.steps", "40", "--checkpoint.every_n_steps", "2")
    folder = run.folder / "checkpoints"
    run.wait_until(lambda: bool(checkpoint.list_steps(run.folder)))
    take(folder)
    run.wait_until(lambda: "A CHECKPOINT COULD NOT BE WRITTEN" in run.said)
    kept = checkpoint.list_steps(run.folder)
    assert "Permission denied" in run.said and "give this user the right to write there" in run.said
    assert kept and checkpoint.newest_usable(run.folder) == (kept[-1], [])
    give_back(folder)
    assert run.end() == 0, run.said
    assert "Traceback" not in run.said
    assert checkpoint.newest_usable(run.folder) == (40, [])
    assert [line["step"] for line in read_metrics(run.folder)] == list(range(1, 41))


@pytest.mark.slow
def test_an_index_that_may_not_be_written_stops_the_run_which_goes_on_later(factbook_dir: Path, place: Path):
    options = (*TWO, "--train.steps", "12", "--checkpoint.every_n_steps", "2", "--index.refresh_every_n_steps", "6")
    run = begin(factbook_dir, place / "run", *options)
    run.wait_for_step(2)
    folder = run.folder / "index" / "versions"
    take(folder)
    assert run.end() == 1, run.said
    assert "Permission denied" in run.said and "give this user the right" in run.said
    assert "then run the same command to go on" in run.said and "Traceback" not in run.said
    step, said = checkpoint.newest_usable(run.folder)
    assert step in (2, 4, 6) and said == []
    give_back(folder)
    again = begin(factbook_dir, run.folder, *options)
    assert again.end() == 0 and f"resumed from step {step}" in again.said, again.said
    assert [line["step"] for line in read_metrics(run.folder)] == list(range(1, 13))


@pytest.mark.parametrize("what", ["the run folder", "its checkpoints, unreadable"])
def test_a_folder_of_somebody_else_is_said_before_anything_is_lost(what: str, factbook_dir: Path, place: Path):
    folder = place / "run"
    (folder / "checkpoints" / "step-4").mkdir(parents=True)
    (folder / "checkpoints" / "step-4" / "state.json").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"step": 4}\n')
    if what == "the run folder":
        take(folder)
        status, words = 2, "cannot be written (Permission denied)"
    else:
        take(folder / "checkpoints")
        (folder / "checkpoints").chmod(0o700)
        status, words = 1, "nothing is lost: give this user the right"
    run = begin(factbook_dir, folder, "--train.steps", "8")
    assert run.end() == status, run.said
    assert words in run.said and "Permission denied" in run.said and "Traceback" not in run.said
    assert (folder / "metrics.jsonl").read_text() == '{"step": 4}\n'  # not cut back to a run that begins anew
