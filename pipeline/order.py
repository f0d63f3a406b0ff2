"""What each rank computes, in order, under each schedule; pure functions of four numbers.

The orders are those of ``torch.distributed.pipelining`` (a test compares them): GPipe (Huang et al. 2019),
1F1B (Narayanan et al. 2019), interleaved 1F1B (Narayanan et al. 2021, with the library's rounds of
micro-batches where they do not divide by the ranks) and zero bubble (ZB1P of Qi et al., 2401.10241, of one or more
stages a rank): its ``backward`` gives the gradient of what was received, ``backward_weight`` that of the parameters.
Stage s runs on rank ``s % num_ranks``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from pipeline.plan_file import LOOPED


class Action(NamedTuple):
    """``forward``, ``backward`` or ``backward_weight`` of one micro-batch on one stage."""

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
    chunks = num_stages // num_ranks
    total = chunks * num_microbatches
    if schedule == "1f1b":
        in_round = num_microbatches
        # Backward follows the forward it waits for, so one more forward comes before the alternation.
        warmup = min(num_ranks - rank, total) - 1
    else:
        in_round = num_microbatches // max(1, num_microbatches // num_ranks)
        distance = (num_ranks - 1 - rank) * (2 if schedule == "interleaved" else 1)
        warmup = min((chunks - 1) * in_round + distance, total)
    forwards = [_action("forward", op, rank, num_ranks, chunks, in_round) for op in range(total)]
    backwards = [_action("backward", op, rank, num_ranks, chunks, in_round) for op in range(total)]
    weights = [Action("backward_weight", action.stage, action.microbatch) for action in backwards]
    order, late = forwards[:warmup], rank if schedule == "zero_bubble" else total
    for op, backward in enumerate(backwards):
        order += [*forwards[warmup + op : warmup + op + 1], backward]
        if op >= late:  # the weights' turn comes when the rank would wait otherwise
            order.append(weights[op - late])
    return (*order, *(weights[max(0, total - late) :] if schedule == "zero_bubble" else ()))


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
    if kind == "backward_weight":
        return ("backward", stage, microbatch) in done
    if kind == "forward":
        return stage == 0 or (kind, stage - 1, microbatch) in done
    if stage == num_stages - 1:
        return ("forward", stage, microbatch) in done
    return (kind, stage + 1, microbatch) in done


def change(kind: str, schedule: str) -> int:
    """By how many micro-batches an action changes what its stage holds."""
    frees = "backward_weight" if schedule == "zero_bubble" else "backward"
    return (kind == "forward") - (kind == frees)


def is_looped(schedule: str) -> bool:
    """Whether a rank may run several stages, and only simulation tells the time."""
    return schedule in LOOPED


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
        now[action.stage] += change(action.kind, schedule)
        if action.kind == "forward":
            moments.append(tuple(now.values()))
    distinct = list(dict.fromkeys(moments))
    if len(stages) > 1:
        return tuple(distinct)
    return (max(distinct),)
