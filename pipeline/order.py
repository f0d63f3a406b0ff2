"""What each rank computes, in order, under each schedule; pure functions of four numbers.

The orders are those of ``torch.distributed.pipelining`` (a test compares them): GPipe (Huang et al. 2019),
1F1B (Narayanan et al. 2019) and interleaved 1F1B (Narayanan et al. 2021, with the library's rounds of
micro-batches where they do not divide by the ranks). Stage s runs on rank ``s % num_ranks``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class Action(NamedTuple):
    """Forward or backward of one micro-batch on one stage."""

    kind: str
    stage: int
    microbatch: int


@lru_cache(maxsize=256)
def rank_order(
    rank: int, *, num_ranks: int, num_stages: int, num_microbatches: int, schedule: str
) -> tuple[Action, ...]:
    """What one rank computes in a step, in order."""
    if schedule == "gpipe":
        forwards = [Action("forward", rank, i) for i in range(num_microbatches)]
        return (*forwards, *(Action("backward", rank, i) for i in range(num_microbatches)))
    chunks = num_stages // num_ranks if schedule == "interleaved" else 1
    total = chunks * num_microbatches
    if schedule == "1f1b":
        in_round = num_microbatches
        # Backward follows the forward it waits for, so one more forward comes before the alternation.
        warmup = min(num_ranks - rank, total) - 1
    else:
        in_round = num_microbatches // max(1, num_microbatches // num_ranks)
        warmup = min((chunks - 1) * in_round + 2 * (num_ranks - 1 - rank), total)
    forwards = [_action("forward", op, rank, num_ranks, chunks, in_round) for op in range(total)]
    backwards = [_action("backward", op, rank, num_ranks, chunks, in_round) for op in range(total)]
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    return (*order, *backwards[total - warmup :])


def _action(kind: str, op: int, rank: int, num_ranks: int, chunks: int, in_round: int) -> Action:
    """Operation ``op`` of a kind: rounds of ``in_round`` micro-batches go through the rank's chunks in turn."""
    chunk = op // in_round % chunks
    if kind == "backward":
        chunk = chunks - 1 - chunk
    microbatch = op // (in_round * chunks) * in_round + op % in_round
    return Action(kind, chunk * num_ranks + rank, microbatch)


@lru_cache(maxsize=64)
def step_order(*, num_ranks: int, num_stages: int, num_microbatches: int, schedule: str) -> tuple[Action, ...]:
    """The actions of all ranks, each after what it waits for; a rank's own are in its order."""
    todo = [
        list(
            rank_order(
                rank,
                num_ranks=num_ranks,
                num_stages=num_stages,
                num_microbatches=num_microbatches,
                schedule=schedule,
            )
        )[::-1]
        for rank in range(num_ranks)
    ]
    done: set[tuple[str, int, int]] = set()
    order: list[Action] = []
    while any(todo):
        before = len(order)
        for actions in todo:
            while actions and _ready(actions[-1], done, num_stages):
                order.append(actions.pop())
                done.add(order[-1])
        assert len(order) > before, "the schedule waits for itself"
    return tuple(order)


def _ready(action: Action, done: set[tuple[str, int, int]], num_stages: int) -> bool:
    kind, stage, microbatch = action
    if kind == "forward":
        return stage == 0 or (kind, stage - 1, microbatch) in done
    if stage == num_stages - 1:
        return ("forward", stage, microbatch) in done
    return (kind, stage + 1, microbatch) in done


@lru_cache(maxsize=256)
def held(
    rank: int, *, num_ranks: int, num_stages: int, num_microbatches: int, schedule: str
) -> tuple[tuple[int, ...], ...]:
    """Micro-batches whose activations each of a rank's stages holds, at all moments where more cannot be held.

    One entry a moment, in it one number for each of the rank's stages, in order.
    """
    stages = range(rank, num_stages, num_ranks)
    now = dict.fromkeys(stages, 0)
    moments: list[tuple[int, ...]] = []
    order = rank_order(
        rank, num_ranks=num_ranks, num_stages=num_stages, num_microbatches=num_microbatches, schedule=schedule
    )
    for action in order:
        now[action.stage] += 1 if action.kind == "forward" else -1
        if action.kind == "forward":
            moments.append(tuple(now.values()))
    distinct = list(dict.fromkeys(moments))
    if len(stages) > 1:
        return tuple(distinct)
    return (max(distinct),)
