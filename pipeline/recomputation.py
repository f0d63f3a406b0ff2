"""Which stages compute a recomputed block again, and the choice of blocks that are worth it.

A recomputed block runs on its own stage and on every later one that reads its results, directly or through
another recomputed block. Recomputing one therefore asks for recomputing the recomputable blocks that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import combinations
from typing import TypeVar

import numpy as np

from pipeline.program import nearest
from pipeline.trace import Profile

EXHAUSTIVE = 4  # more recomputable blocks than this are chosen greedily

Outcome = TypeVar("Outcome")


def reach(points: Iterable[int], num_blocks: int) -> np.ndarray:
    """For each start 0..n the smallest of ``points`` at or after it; n where there is none."""
    result = np.full(num_blocks + 1, num_blocks)
    for point in points:
        result[: point + 1] = np.minimum(result[: point + 1], point)
    return result


def producers(profile: Profile) -> dict[int, frozenset[int]]:
    """For each recomputable block the recomputable blocks it reads."""
    writer = {name: i for i, b in enumerate(profile.blocks) if b.recomputable for name in b.writes}
    return {
        i: frozenset(writer[name] for name in b.reads if name in writer)
        for i, b in enumerate(profile.blocks)
        if b.recomputable
    }


def readers(profile: Profile, recomputed: Collection[str]) -> dict[int, tuple[int, ...]]:
    """For each recomputed block the blocks whose stages need it: readers, also through recomputed blocks.

    Raises:
        ValueError: if a name is unknown or not recomputable, or a block is recomputed while one that it reads is not.
    """
    names = [block.name for block in profile.blocks]
    for name in recomputed:
        if name not in names:
            raise ValueError(f"plan: recomputed names unknown block {name!r}{nearest(name, names)}")
        if not profile.blocks[names.index(name)].recomputable:
            raise ValueError(f"plan: recomputed names block {name!r}, which is not recomputable in the model")
    chosen = sorted(names.index(name) for name in set(recomputed))
    for block, others in producers(profile).items():
        if block in chosen and not others <= set(chosen):
            missing = names[min(others - set(chosen))]
            raise ValueError(
                f"plan: recomputed has {names[block]!r}, but not {missing!r}, whose results it reads; "
                "add that one or leave both out"
            )
    result: dict[int, tuple[int, ...]] = {}
    for block in reversed(chosen):
        writes = set(profile.blocks[block].writes)
        found = {i for i, other in enumerate(profile.blocks) if writes & set(other.reads)}
        if writes & set(profile.outputs):
            found.add(len(names) - 1)
        for through in found & result.keys():
            found |= set(result[through])
        result[block] = tuple(sorted(found))
    return result


def choose(profile: Profile, evaluate: Callable[[tuple[str, ...]], tuple[tuple[float, ...], Outcome]]) -> Outcome:
    """The outcome with the smallest score over sets of recomputed blocks.

    Up to four recomputable blocks: all sets. More: from none, and from all, blocks are added and taken away one
    by one while that helps. Equal scores go to the smaller set.
    """
    needs = producers(profile)
    seen: dict[frozenset[int], tuple[tuple[float, ...], Outcome]] = {}

    def score(chosen: frozenset[int]) -> tuple[float, ...]:
        if chosen not in seen:
            seen[chosen] = evaluate(tuple(profile.blocks[i].name for i in sorted(chosen)))
        return seen[chosen][0]

    if len(needs) <= EXHAUSTIVE:
        for size in range(len(needs) + 1):
            for some in combinations(needs, size):
                if all(needs[i] <= set(some) for i in some):
                    score(frozenset(some))
    else:
        for start in (frozenset[int](), frozenset(needs)):
            _descend(start, needs, score)
    best = min(seen, key=lambda chosen: (seen[chosen][0], len(chosen), sorted(chosen)))
    return seen[best][1]


def _descend(
    start: frozenset[int], needs: dict[int, frozenset[int]], score: Callable[[frozenset[int]], tuple[float, ...]]
) -> None:
    now = start
    while True:
        neighbours = [_with(now, block, needs) if block not in now else _without(now, block, needs) for block in needs]
        best = min(neighbours, key=score)
        if score(best) >= score(now):
            return
        now = best


def _with(chosen: frozenset[int], block: int, needs: dict[int, frozenset[int]]) -> frozenset[int]:
    result, todo = set(chosen), [block]
    while todo:
        one = todo.pop()
        result.add(one)
        todo += needs[one] - result
    return frozenset(result)


def _without(chosen: frozenset[int], block: int, needs: dict[int, frozenset[int]]) -> frozenset[int]:
    gone = {block}
    for other in sorted(chosen):  # producers come before what reads them
        if needs[other] & gone:
            gone.add(other)
    return chosen - gone
