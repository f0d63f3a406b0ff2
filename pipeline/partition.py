"""Where to cut: exact, for one chunk of consecutive blocks a rank.

Objective ``speed`` minimises ``sum of stage times + (M - 1) * slowest stage`` (Huang et al., GPipe, 2019;
the time of both schedules here), with a stage's time its forward, backward and the sending of its carry
there and back. For each bound on the slowest stage a dynamic program finds the smallest sum; the bounds
worth trying are found by bisection between stage times, which stops where no bound in between can win.
``memory`` minimises the largest peak memory of a stage, then the time. Exactness costs O(S n^2) a bound
and a few tens of bounds: a second or so for 400 blocks on 16 stages.

The search knows nothing of the time to synchronise tied parameters; their bytes do count on every stage.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from pipeline.costs import CostTable, Link, in_flight, stage_cost
from pipeline.plan_file import SCHEDULES, Plan, StagePlan
from pipeline.program import nearest
from pipeline.simulate import simulate
from pipeline.trace import Profile

_Cuts = tuple[int, ...]  # bounds of the stages: 0, ..., n


def partition(
    profile: Profile,
    *,
    num_stages: int,
    schedule: str,
    num_microbatches: int,
    objective: str = "speed",
    capacity_bytes: float | None = None,
    link_latency_s: float = 0.0,
    link_bytes_per_s: float = float("inf"),
    pins: Sequence[str] = (),
    parameter_copies: float = 4.0,
) -> Plan:
    """The best plan. ``step_s``, ``bubble`` and ``memory_bytes`` come from simulating it.

    Args:
        capacity_bytes: most memory a stage may need (None: any).
        pins: blocks that must be the first of their stage.
        parameter_copies: bytes kept for each byte of parameters (see `pipeline.costs`).

    Raises:
        ValueError: if nothing fits; for the capacity, says the smallest one that would do.
    """
    n = len(profile.blocks)
    link = Link(link_latency_s, link_bytes_per_s)
    cuts = _pinned(profile, pins, num_stages)
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; allowed: {', '.join(SCHEDULES)}")
    if objective not in ("speed", "memory"):
        raise ValueError(f"objective is {objective!r}; allowed: 'speed', 'memory'")
    if not 1 <= num_stages <= n:
        raise ValueError(f"num_stages is {num_stages}; a program of {n} blocks can have 1 to {n}")
    if num_microbatches != profile.num_microbatches:
        raise ValueError(
            f"num_microbatches is {num_microbatches}, but the profile was "
            f"traced for {profile.num_microbatches} "
            f"(micro-batches of {profile.num_samples // profile.num_microbatches} samples); trace again"
        )
    # Checks 1f1b's need of micro-batches before any work.
    Plan(tuple(StagePlan((b.name,)) for b in profile.blocks[:num_stages]), schedule, num_microbatches)
    table = CostTable.of(profile, link=link, num_microbatches=num_microbatches, parameter_copies=parameter_copies)
    allowed = np.isfinite(table.time_s)
    for cut in cuts:
        allowed[:cut, cut + 1 :] = False
    flights = [
        in_flight(s, num_stages=num_stages, num_microbatches=num_microbatches, schedule=schedule)
        for s in range(num_stages)
    ]
    memory = [np.where(allowed, table.memory(f), np.inf) for f in flights]
    if objective == "memory" or capacity_bytes is not None:
        smallest = _smallest_peak(memory)
        if capacity_bytes is not None and smallest > capacity_bytes:
            raise ValueError(
                f"no cut into {num_stages} stages fits into {int(capacity_bytes)} "
                "bytes a stage; the smallest capacity that "
                f"would do is {int(smallest)} bytes (or use more stages, or smaller micro-batches)"
            )
        limit = smallest if objective == "memory" else capacity_bytes
        masks = [m <= limit for m in memory]
    else:
        masks = [allowed] * num_stages
    bounds = _fastest(table.time_s, masks, num_microbatches)
    stages = []
    for a, b in pairwise(bounds):
        cost = stage_cost(profile, a, b, num_microbatches=num_microbatches, parameter_copies=parameter_copies)
        names = tuple(block.name for block in profile.blocks[a:b])
        stages.append(StagePlan(names, cost.forward_s, cost.backward_s, 0, cost.send_bytes))
    plan = Plan(tuple(stages), schedule, num_microbatches)
    run = simulate(profile, plan, link=link, parameter_copies=parameter_copies)
    stages = [replace(s, memory_bytes=m) for s, m in zip(stages, run.peak_memory_bytes, strict=True)]
    return replace(plan, stages=tuple(stages), step_s=run.step_s, bubble=run.bubble)


def _pinned(profile: Profile, pins: Sequence[str], num_stages: int) -> list[int]:
    names = [block.name for block in profile.blocks]
    for pin in pins:
        if pin not in names:
            raise ValueError(f"pins names unknown block {pin!r}{nearest(pin, names)}")
    cuts = sorted({names.index(pin) for pin in pins} - {0})
    if len(cuts) > num_stages - 1:
        raise ValueError(f"{len(cuts)} pinned cuts need {len(cuts) + 1} stages, but num_stages is {num_stages}")
    return cuts


def _search(cost: np.ndarray, masks: Sequence[np.ndarray], *, minimax: bool) -> tuple[float, _Cuts]:
    """Best bounds by dynamic programming over (stage, end); (inf, ()) where nothing is allowed."""
    n = cost.shape[0] - 1
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    froms = []
    for mask in masks:
        step = np.where(mask, cost, np.inf)
        through = np.maximum(best[:, None], step) if minimax else best[:, None] + step
        froms.append(through.argmin(axis=0))
        best = through.min(axis=0)
    if not np.isfinite(best[n]):
        return float("inf"), ()
    bounds, end = [n], n
    for origin in reversed(froms):
        end = int(origin[end])
        bounds.append(end)
    return float(best[n]), tuple(reversed(bounds))


def _smallest_peak(memory: Sequence[np.ndarray]) -> float:
    """Smallest possible largest memory of a stage, each stage with its own table."""
    n = memory[0].shape[0] - 1
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    for table in memory:
        best = np.maximum(best[:, None], table).min(axis=0)
    return float(best[n])


def _fastest(time_s: np.ndarray, masks: Sequence[np.ndarray], num_microbatches: int) -> _Cuts:
    """Bounds with the smallest sum + (M - 1) * max."""
    weight = num_microbatches - 1
    lowest, bounds = _search(time_s, masks, minimax=True)
    assert bounds, "num_stages <= blocks and at most num_stages - 1 pins always leave a way"
    candidates = np.unique(time_s[np.isfinite(time_s)]).tolist()
    best_total, best_bounds = float("inf"), bounds

    def least_sum(bound: float) -> float:
        nonlocal best_total, best_bounds
        total, found = _search(time_s, [mask & (time_s <= bound) for mask in masks], minimax=False)
        slowest = max(time_s[a, b] for a, b in pairwise(found))
        if total + weight * slowest < best_total:
            best_total, best_bounds = total + weight * slowest, found
        return total

    low, high = bisect.bisect_left(candidates, lowest), len(candidates) - 1
    intervals = [(low, least_sum(candidates[low]), high, least_sum(candidates[high]))]
    while intervals:
        low, sum_low, high, sum_high = intervals.pop()
        # A bound in between cannot have a smaller sum than the loosest, nor be below the next candidate.
        if high - low < 2 or sum_low <= sum_high or sum_high + weight * candidates[low + 1] >= best_total:
            continue
        middle = (low + high) // 2
        sum_middle = least_sum(candidates[middle])
        intervals += [(middle, sum_middle, high, sum_high), (low, sum_low, middle, sum_middle)]
    return best_bounds
