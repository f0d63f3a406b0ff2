"""Other processes compute while a trace measures, and are gone afterwards."""

from __future__ import annotations

import multiprocessing
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline import BlockProgram
from pipeline.busy import BusyRanks, num_busy
from tests.pipeline.fid_program import fid_batch, fid_program


def source(folder: str) -> tuple[BlockProgram, dict[str, Any], int]:
    program = fid_program()
    marks = Path(folder)
    program.blocks[0].module.register_forward_hook(lambda *_: (marks / str(os.getpid())).touch())
    return program, fid_batch(), 3


def broken() -> tuple[BlockProgram, dict[str, Any], int]:
    raise KeyError("on purpose")


def test_others_trace_until_the_end(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    with BusyRanks(partial(source, str(tmp_path)), count=1, lineage_samples=2):
        (process,) = set(multiprocessing.active_children()) - before
        while not list(tmp_path.iterdir()):  # it computes by itself
            assert process.is_alive()
        assert [path.name for path in tmp_path.iterdir()] == [str(process.pid)]
        assert process.is_alive()
    assert not process.is_alive()


def test_a_process_that_cannot_build_the_program_says_so() -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(ValueError, match="could not build the program: KeyError: 'on purpose'"):
        BusyRanks(broken, count=1, lineage_samples=2).__enter__()
    assert set(multiprocessing.active_children()) == before


def dies() -> tuple[BlockProgram, dict[str, Any], int]:
    program = fid_program()
    program.blocks[0].module.register_forward_hook(lambda *_: os._exit(7))
    return program, fid_batch(), 3


def test_a_process_that_dies_while_others_measure_is_no_secret() -> None:
    before = set(multiprocessing.active_children())
    said = "1 of 1 busy ranks beside the trace ended with status 7"
    with pytest.raises(ValueError, match=said), BusyRanks(dies, count=1, lineage_samples=2):
        for process in set(multiprocessing.active_children()) - before:
            process.join()


def test_an_error_of_the_trace_itself_is_the_one_that_is_told() -> None:
    with pytest.raises(KeyError, match="of the trace"), BusyRanks(dies, count=1, lineage_samples=2):
        raise KeyError("of the trace")


def test_as_many_as_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    assert [num_busy(n) for n in (1, 2, 8)] == [1, 2, 3]
