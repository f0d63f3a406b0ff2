"""A step played through, event by event: when each rank computes, waits and sends, and what it holds.

Under ``gpipe`` and ``1f1b`` the library asks for a message when it needs it and waits, so a message takes the
receiver's time, as in the partition's formula. The looped schedules ask ahead: there, sending overlaps with computing.
A link carries one message a direction at a time. After the last backward, parameters that several ranks hold are
all-reduced (`reduce`), by all ranks together.

Under ``zero_bubble`` a backward is two parts, for what was received and for the parameters. The trace does not tell
them apart; half each is assumed, and all of it for the parameters on the first stage, which received nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from pipeline.costs import Bounds, Costs, Link, StageCost
from pipeline.order import Action, change, held, is_looped, step_order
from pipeline.plan_file import Plan, StagePlan
from pipeline.program import nearest
from pipeline.timeline import Event, is_computing, write_perfetto
from pipeline.trace import Profile

__all__ = ["Event", "Simulation", "predicted", "simulate"]


@dataclass(frozen=True)
class Simulation:
    """Outcome of `simulate`.

    Attributes:
        bubble: share of all ranks' time that is not spent computing.
        peak_memory_bytes: per stage, by itself.
        rank_memory_bytes: per rank: all its stages at the moment when they hold most, parameters that they share
            once.
        link_bytes: sent over the link behind each stage in a step, both directions.
        tie_bytes: parameters that several ranks hold, all-reduced once a step.
    """

    step_s: float
    bubble: float
    peak_memory_bytes: tuple[int, ...]
    rank_memory_bytes: tuple[int, ...]
    link_bytes: tuple[int, ...]
    tie_bytes: int
    events: tuple[Event, ...]
    num_ranks: int

    def write_trace(self, path: str | Path) -> None:
        """Write a Chrome trace (JSON) that Perfetto and chrome://tracing open: one row a rank and a link."""
        write_perfetto(path, {"predicted": self.events}, num_ranks=self.num_ranks)


def simulate(profile: Profile, plan: Plan, *, link: Link | None = None, parameter_copies: float = 4.0) -> Simulation:
    """Play one step of a plan with the profile's costs.

    Raises:
        ValueError: if the plan names blocks that the profile lacks, or other micro-batches.
    """
    names = [block.name for block in profile.blocks]
    planned = [name for stage in plan.stages for name in stage.blocks]
    for name in planned:
        if name not in names:
            raise ValueError(f"plan names block {name!r}, which the profile lacks{nearest(name, names)}")
    if planned != names:
        raise ValueError("the plan's blocks are not the profile's, in order")
    if plan.num_microbatches != profile.num_microbatches:
        raise ValueError(
            f"the plan has {plan.num_microbatches} micro-batches, the profile was traced for {profile.num_microbatches}"
        )
    costs = Costs(profile, link=link, parameter_copies=parameter_copies, recomputed=plan.recomputed)
    bounds = (0, *(last for _, last in plan.bounds()))
    stages = [costs.stage(a, b) for a, b in pairwise(bounds)]
    order = step_order(
        num_ranks=plan.num_ranks,
        num_stages=plan.num_stages,
        num_microbatches=plan.num_microbatches,
        schedule=plan.schedule,
    )
    ties = costs.tie_bytes(bounds, num_ranks=plan.num_ranks)
    events: list[Event] = []
    ended = play(
        order,
        forward_s=[s.forward_s for s in stages],
        backward_s=[s.backward_s for s in stages],
        overlaps=is_looped(plan.schedule),
        splits=plan.schedule == "zero_bubble",
        send_s=[costs.link.seconds(stage.send_bytes) for stage in stages],
        return_s=[costs.link.seconds(stage.return_bytes) for stage in stages],
        num_ranks=plan.num_ranks,
        events=events,
    )
    reduce_s = costs.tie_seconds(bounds, num_ranks=plan.num_ranks)
    if reduce_s:
        events += [Event("reduce", rank, 0, ended, ended + reduce_s) for rank in range(plan.num_ranks)]
    step_s = ended + reduce_s
    busy = sum(e.end_s - e.start_s for e in events if is_computing(e))
    return Simulation(
        step_s=step_s,
        bubble=1.0 - busy / (plan.num_ranks * step_s) if step_s else 0.0,
        peak_memory_bytes=tuple(
            _peak(events, {s: cost.flight_bytes}, plan.schedule) + cost.static_bytes for s, cost in enumerate(stages)
        ),
        rank_memory_bytes=tuple(_rank_peak(rank, plan, costs, stages, events) for rank in range(plan.num_ranks)),
        link_bytes=tuple(plan.num_microbatches * (cost.send_bytes + cost.return_bytes) for cost in stages),
        tie_bytes=ties,
        events=tuple(sorted(events, key=lambda e: (e.start_s, e.end_s, e.stage))),
        num_ranks=plan.num_ranks,
    )


def predicted(
    profile: Profile,
    bounds: Bounds,
    *,
    schedule: str,
    num_ranks: int,
    recomputed: Sequence[str] = (),
    link: Link | None = None,
    parameter_copies: float = 4.0,
) -> Plan:
    """The plan with these stages, its predictions from simulating it."""
    costs = Costs(profile, link=link, parameter_copies=parameter_copies, recomputed=recomputed)
    stages = []
    for a, b in pairwise(bounds):
        cost = costs.stage(a, b)
        names = tuple(block.name for block in profile.blocks[a:b])
        stages.append(StagePlan(names, cost.forward_s, cost.backward_s, 0, cost.send_bytes, cost.return_bytes))
    plan = Plan(
        tuple(stages), schedule, profile.num_microbatches, num_ranks=num_ranks, recomputed=tuple(recomputed)
    )  # fmt: skip
    run = simulate(profile, plan, link=link, parameter_copies=parameter_copies)
    stages = [replace(s, memory_bytes=m) for s, m in zip(stages, run.peak_memory_bytes, strict=True)]
    reduce_s = costs.tie_seconds(bounds, num_ranks=num_ranks)
    return replace(plan, stages=tuple(stages), step_s=run.step_s, bubble=run.bubble, reduce_s=reduce_s)


def play(
    order: Sequence[Action],
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_s: Sequence[float],
    return_s: Sequence[float],
    num_ranks: int,
    overlaps: bool,
    splits: bool = False,
    events: list[Event] | None = None,
) -> float:
    """When the last rank is done, for stages with these times; ``events`` is filled if given.

    Args:
        order: of all ranks (`pipeline.order.step_order`).
        overlaps: sending takes no rank's time.
        splits: the backward is two parts (``zero_bubble``).
        send_s, return_s: of one message over the cut behind each stage, and of its gradient back.
    """
    last = len(forward_s) - 1
    weight_s = [b / 2 if stage else b for stage, b in enumerate(backward_s)] if splits else [0.0] * (last + 1)
    durations = {
        "forward": forward_s,
        "backward": [whole - weight for whole, weight in zip(backward_s, weight_s, strict=True)],
        "backward_weight": weight_s,
    }
    free = [0.0] * num_ranks
    link_free = [[0.0] * num_ranks for _ in range(num_ranks)]
    came: dict[tuple[bool, int, int], tuple[float, float]] = {}  # when it is there or can be sent, and time to send
    for kind, stage, i in order:
        rank = stage % num_ranks
        forward = kind == "forward"
        ready, seconds = (0.0, 0.0) if kind == "backward_weight" else came.get((forward, stage, i), (0.0, 0.0))
        start = max(free[rank], ready)
        if seconds:  # waited for by the receiver
            source = stage - 1 if forward else stage + 1
            start = _send(source, stage, i, start, seconds, link_free, events)
        free[rank] = end = start + durations[kind][stage]
        if events is not None:
            events.append(Event(kind, stage, i, start, end))
        if kind == "backward_weight":
            continue
        if forward and stage == last:
            came[False, stage, i] = end, 0.0
        elif forward or stage:
            target = stage + 1 if forward else stage - 1
            seconds = (send_s[stage] if forward else return_s[target]) if num_ranks > 1 else 0.0
            if seconds and overlaps:
                end, seconds = _send(stage, target, i, end, seconds, link_free, events), 0.0
            came[forward, target, i] = end, seconds
    return max(free)


def _send(
    source: int,
    target: int,
    microbatch: int,
    ready: float,
    seconds: float,
    link_free: list[list[float]],
    events: list[Event] | None,
) -> float:
    """When a message that can go at ``ready`` has arrived."""
    num_ranks = len(link_free)
    line, to = link_free[source % num_ranks], target % num_ranks
    begin = max(ready, line[to])
    line[to] = begin + seconds
    if events is not None:
        kind = "send" if target > source else "send_gradient"
        events.append(Event(kind, source, microbatch, begin, line[to]))
    return line[to]


def _peak(events: Sequence[Event], flight_bytes: dict[int, int], schedule: str) -> int:
    """Most bytes of activations that these stages, all of one rank, hold at once; ``events`` in the rank's order."""
    now = peak = 0
    for event in events:
        if event.stage in flight_bytes:
            now += flight_bytes[event.stage] * change(event.kind, schedule)
            peak = max(peak, now)
    return peak


def _rank_peak(rank: int, plan: Plan, costs: Costs, stages: Sequence[StageCost], events: Sequence[Event]) -> int:
    mine, bounds = plan.stages_of(rank), plan.bounds()
    static = costs.parameter_memory([bounds[s] for s in mine]) + sum(stages[s].buffer_bytes for s in mine)
    return static + _peak(events, {s: stages[s].flight_bytes for s in mine}, plan.schedule)


def rank_memory(
    costs: Costs, bounds: Bounds, *, num_ranks: int, num_microbatches: int, schedule: str
) -> tuple[int, ...]:
    """What `simulate` gives as ``rank_memory_bytes``, from the order alone (it does not depend on times)."""
    stages = list(pairwise(bounds))
    result = []
    for rank in range(num_ranks):
        mine = stages[rank::num_ranks]
        flight = [int(costs.flight_bytes[a, b]) for a, b in mine]
        moments = held(
            rank,
            num_ranks=num_ranks,
            num_stages=len(stages),
            num_microbatches=num_microbatches,
            schedule=schedule,
        )
        most = max(sum(count * size for count, size in zip(m, flight, strict=True)) for m in moments)
        result.append(rank_static(costs, mine) + most)
    return tuple(result)


def rank_static(costs: Costs, stages: Sequence[tuple[int, int]]) -> int:
    """The part of it that does not change within a step: parameters and receive buffers of a rank's stages."""
    return costs.parameter_memory(stages) + sum(costs.buffers(a, b) for a, b in stages)
