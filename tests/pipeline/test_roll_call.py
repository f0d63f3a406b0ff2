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


def _an_error_of_its_own() -> str:
    program = fid_program()
    pipeline = Pipeline(program, Plan.from_cuts(program, [2], num_microbatches=2), timeout_s=3)
    if pipeline.rank == 1:

        def fail(*_: object) -> None:
            raise RuntimeError("shapes do not fit")

        program.blocks[3].module.register_forward_hook(fail)
    with pytest.raises(RuntimeError) as error:
        pipeline.step(fid_batch(), seed=0, step=0)
    return str(error.value)


def test_an_error_of_ones_own_is_passed_on_as_it_is() -> None:
    first, second = run_on_ranks(_an_error_of_its_own, 2, fresh=True)
    assert "shapes do not fit" in second and "died" not in second
    assert "died" not in first
