"""The pool of ranks: kept between jobs, rebuilt after any failure."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests import distributed
from tests.distributed import POOL_RANKS, run_on_ranks


def _place() -> tuple[int, int, int]:
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    return os.getpid(), dist.get_rank(), int(total)


def _two_groups() -> int:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total, group=groups[dist.get_rank() // 2])
    return int(total)


def _fail(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ArithmeticError("on purpose")
    dist.barrier()  # waits for ever: the one that failed never comes


def _die(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _sleep() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def _draw() -> float:
    return torch.rand(()).item()


def _spoil() -> None:
    torch.set_default_dtype(torch.float64)


def _default_dtype() -> str:
    return str(torch.get_default_dtype())


def test_ranks_are_kept_and_shared_between_world_sizes() -> None:
    first = run_on_ranks(_place, 2)
    again, more = run_on_ranks(_place, 2), run_on_ranks(_place, 3)
    assert first == again and first[0][0] != first[1][0]
    assert [pid for pid, *_ in more[:2]] == [pid for pid, *_ in first]
    assert [rest for _, *rest in more] == [[0, 6], [1, 6], [2, 6]]
    assert len(distributed._pool.pids) <= POOL_RANKS


def test_fresh_ranks_live_for_one_call() -> None:
    kept = run_on_ranks(_place, 2)
    fresh = run_on_ranks(_place, 2, fresh=True)
    assert not {pid for pid, *_ in kept} & {pid for pid, *_ in fresh}
    for pid, *_ in fresh:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_groups_of_one_job_do_not_reach_the_next() -> None:
    assert [run_on_ranks(_two_groups, 4) for _ in range(2)] == [[1, 1, 5, 5]] * 2


def test_a_job_starts_with_the_same_generator_and_dtype() -> None:
    assert run_on_ranks(_draw, 2) == run_on_ranks(_draw, 2)
    run_on_ranks(_spoil, 2)
    assert run_on_ranks(_default_dtype, 2) == ["torch.float32"] * 2


@pytest.mark.parametrize("fresh", [False, True])
def test_an_exception_surfaces_with_rank_and_traceback(fresh: bool) -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 failed(.|\n)*_fail(.|\n)*ArithmeticError: on purpose"):
        run_on_ranks(_fail, 2, 1, fresh=fresh, timeout_s=60)
    assert time.monotonic() - started < 30  # the other rank's wait of 60 s is not sat out
    assert [total for *_, total in run_on_ranks(_place, 2)] == [3, 3]


def test_a_rank_that_dies_is_named_and_replaced() -> None:
    before = run_on_ranks(_place, 2)
    with pytest.raises(RuntimeError, match="rank 1 of 2 died with exit code -9"):
        run_on_ranks(_die, 2, 1)
    after = run_on_ranks(_place, 2)
    assert not {pid for pid, *_ in before} & {pid for pid, *_ in after}


def test_a_rank_that_died_between_jobs_is_replaced() -> None:
    pid = run_on_ranks(_place, 2)[0][0]
    os.kill(pid, signal.SIGKILL)
    distributed._pool._processes[0].join()
    after = run_on_ranks(_place, 2)
    assert [total for *_, total in after] == [3, 3] and pid not in [pid for pid, *_ in after]


def test_a_timeout_kills_and_the_pool_is_rebuilt() -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] of 2 did not finish within 3 s"):
        run_on_ranks(_sleep, 2, timeout_s=3)
    assert time.monotonic() - started < 20
    assert [total for *_, total in run_on_ranks(_place, 2)] == [3, 3]
