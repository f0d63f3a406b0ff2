"""Local search over cuts, for costs that depend on all stages at once (interleaving).

Neighbours of a plan have one cut moved by a few blocks, or two cuts moved together, so that a stage (or the
stages between) keeps its size; every one is scored by simulation, which bounds how many can be tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, pairwise
from math import comb

import numpy as np

from pipeline.costs import Bounds

Score = tuple[float, ...]


def best_bounds(
    score: Callable[[Bounds], Score],
    starts: Iterable[Bounds],
    *,
    allowed: np.ndarray,
    num_stages: int,
    budget: int,
    exhaustive: int,
) -> Bounds:
    """The best bounds found: of all, where there are at most ``exhaustive``, else downhill from each start.

    Args:
        score: smaller is better.
        starts: allowed bounds, at least one.
        allowed: (n + 1, n + 1), whether the blocks a to b - 1 may be a stage.
        budget: plans scored at most, give or take one round of neighbours.
    """
    n = allowed.shape[0] - 1
    seen: dict[Bounds, Score] = {}

    def value(bounds: Bounds) -> Score:
        if bounds not in seen:
            seen[bounds] = score(bounds)
        return seen[bounds]

    if comb(n - 1, num_stages - 1) <= min(exhaustive, budget):
        for cuts in combinations(range(1, n), num_stages - 1):
            bounds = (0, *cuts, n)
            if _is_allowed(bounds, allowed):
                value(bounds)
        return min(seen, key=lambda b: (seen[b], b))
    ranked = sorted(dict.fromkeys(starts), key=value)
    for start in ranked:
        now = start
        while len(seen) < budget:
            better = min(_neighbours(now, allowed), key=value, default=now)
            if value(better) >= value(now):
                break
            now = better
    return min(seen, key=lambda b: (seen[b], b))


def _neighbours(bounds: Bounds, allowed: np.ndarray) -> Iterator[Bounds]:
    last = len(bounds) - 1
    for first in range(1, last):
        for second in range(first, last):
            for move in (-1, 1) if second > first else (-4, -2, -1, 1, 2, 4):
                for direction in (1, -1) if second > first else (1,):
                    moved = list(bounds)
                    moved[first] += move
                    if second > first:
                        moved[second] += move * direction
                    candidate = tuple(moved)
                    if _is_allowed(candidate, allowed):
                        yield candidate


def _is_allowed(bounds: Bounds, allowed: np.ndarray) -> bool:
    stages = list(pairwise(bounds))
    return all(a < b for a, b in stages) and all(allowed[a, b] for a, b in stages)
