"""A rank that is killed in the middle of a step is named by the others, at once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from pipeline import Pipeline, Plan
from tests.distributed import run_on_ranks
from tests.pipeline.fid_program import fid_batch, fid_program


def _one_is_killed(folder: str) -> None:
    program = fid_program()
    pipeline = Pipeline(program, Plan.from_cuts(program, [2, 4], num_microbatches=3), timeout_s=60)
    pipeline.step(fid_batch(), seed=0, step=0)
    if pipeline.rank == 1:
        Path(folder, "pid").write_text(str(os.getpid()))
        program.blocks[3].module.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    start = time.monotonic()
    try:
        pipeline.step(fid_batch(), seed=0, step=1)
    except RuntimeError as error:
        partial = Path(folder, f"{pipeline.rank}.partial")
        partial.write_text(f"{time.monotonic() - start}\n{error}")
        partial.rename(Path(folder, f"{pipeline.rank}.said"))
        raise


def test_the_others_name_the_rank_that_was_killed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"rank \d of 3"):
        run_on_ranks(_one_is_killed, 3, str(tmp_path), timeout_s=60, fresh=True)
    pid = (tmp_path / "pid").read_text()
    said = sorted(tmp_path.glob("*.said"))
    assert said, "the ranks beside it lost their connection and say so"
    for path in said:
        seconds, _, message = path.read_text().partition("\n")
        assert f"rank 1 of the pipeline (global rank 1, process {pid} on" in message and "died" in message
        assert float(seconds) < 30, "by the lost connection, not by the timeout of 60 s"


def _an_error_of_its_own(kind: str) -> str:
    program = fid_program()
    pipeline = Pipeline(program, Plan.from_cuts(program, [2], num_microbatches=2), timeout_s=3)
    if pipeline.rank == 1:

        def fail(*_: object) -> None:
            if kind == "hangs":
                time.sleep(20)
            raise ValueError("shapes do not fit")

        program.blocks[3].module.register_forward_hook(fail)
    with pytest.raises((RuntimeError, ValueError)) as error:
        pipeline.step(fid_batch(), seed=0, step=0)
    return str(error.value)


def test_an_error_of_ones_own_is_passed_on_and_told_to_the_others() -> None:
    first, second = run_on_ranks(_an_error_of_its_own, 2, "fails", fresh=True)
    assert second == "shapes do not fit"
    assert "rank 1 of the pipeline" in first and "failed: ValueError: shapes do not fit" in first


def test_a_rank_that_hangs_is_named_after_the_timeout() -> None:
    first, _ = run_on_ranks(_an_error_of_its_own, 2, "hangs", fresh=True)
    assert "no sign of life within 5 s from rank 1 of the pipeline" in first
