"""Exact searches over cuts by dynamic programming, for stages whose costs do not depend on each other.

``time_s`` and the masks are (n + 1, n + 1) tables, [a, b] for the blocks a to b - 1 as a stage; one mask a stage
says which blocks it may be.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from pipeline.costs import Bounds


def search(cost: np.ndarray, masks: Sequence[np.ndarray], *, minimax: bool) -> tuple[float, Bounds]:
    """Bounds with the smallest sum (or largest) of stage costs; (inf, ()) where nothing is allowed."""
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


def smallest_peak(memory: Sequence[np.ndarray]) -> tuple[float, Bounds]:
    """Bounds with the smallest largest memory of a stage, each stage with its own table (infinite: not allowed)."""
    n = memory[0].shape[0] - 1
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    froms = []
    for table in memory:
        through = np.maximum(best[:, None], table)
        froms.append(through.argmin(axis=0))
        best = through.min(axis=0)
    bounds, end = [n], n
    for origin in reversed(froms):
        end = int(origin[end])
        bounds.append(end)
    return float(best[n]), tuple(reversed(bounds))


def fastest(time_s: np.ndarray, masks: Sequence[np.ndarray], num_microbatches: int) -> Bounds:
    """Bounds with the smallest ``sum + (M - 1) * slowest``; () where nothing is allowed.

    For each bound on the slowest stage a search finds the smallest sum; the bounds worth trying are found by
    bisection between stage times, which stops where no bound in between can win.
    """
    weight = num_microbatches - 1
    lowest, bounds = search(time_s, masks, minimax=True)
    if not bounds:
        return ()
    candidates = np.unique(time_s[np.isfinite(time_s)]).tolist()
    best_total, best_bounds = float("inf"), bounds

    def least_sum(bound: float) -> float:
        nonlocal best_total, best_bounds
        total, found = search(time_s, [mask & (time_s <= bound) for mask in masks], minimax=False)
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
