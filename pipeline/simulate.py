"""A step played through, event by event: when each stage computes, waits and sends, and what it holds.

Sending overlaps with computing, and a link carries one message a direction at a time. That is kinder
than the partition's formula (which adds sending to the stage) and closer to what the library does.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pipeline.costs import Link, StageCost, in_flight, stage_cost
from pipeline.plan_file import Plan
from pipeline.program import nearest
from pipeline.trace import Profile


@dataclass(frozen=True)
class Event:
    """``kind``: forward, backward (of ``stage``), send or send_gradient (from ``stage``)."""

    kind: str
    stage: int
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Simulation:
    """Outcome of `simulate`.

    Attributes:
        bubble: share of all stages' time that is not spent computing.
        peak_memory_bytes: per stage.
        link_bytes: sent over the link behind each stage in a step, both directions.
    """

    step_s: float
    bubble: float
    peak_memory_bytes: tuple[int, ...]
    link_bytes: tuple[int, ...]
    events: tuple[Event, ...]

    def write_trace(self, path: str | Path) -> None:
        """Write a Chrome trace (JSON) that Perfetto and chrome://tracing open: one row a stage and a link."""
        rows = []
        for event in self.events:
            link = event.kind.startswith("send")
            rows.append(
                {
                    "name": f"{event.kind} {event.microbatch}",
                    "cat": event.kind,
                    "ph": "X",
                    "ts": event.start_s * 1e6,
                    "dur": (event.end_s - event.start_s) * 1e6,
                    "pid": 1 if link else 0,
                    "tid": event.stage,
                    "args": {"stage": event.stage, "microbatch": event.microbatch},
                }
            )
        names = [
            {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}
            for pid, name in enumerate(("stages", "links"))
        ]
        Path(path).write_text(json.dumps({"traceEvents": names + rows, "displayTimeUnit": "ms"}))


def stage_order(stage: int, *, num_stages: int, num_microbatches: int, schedule: str) -> list[tuple[str, int]]:
    """What a stage computes, in order: (forward or backward, micro-batch)."""
    warmup = in_flight(stage, num_stages=num_stages, num_microbatches=num_microbatches, schedule=schedule)
    order = [("forward", i) for i in range(warmup)]
    for i in range(num_microbatches):
        order.append(("backward", i))
        if warmup + i < num_microbatches:
            order.append(("forward", warmup + i))
    return order


def simulate(profile: Profile, plan: Plan, *, link: Link | None = None, parameter_copies: float = 4.0) -> Simulation:
    """Play one step of a plan with the profile's costs.

    Raises:
        ValueError: if the plan names blocks that the profile lacks, or other micro-batches.
    """
    link = link or Link()
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
    count, num_stages = plan.num_microbatches, plan.num_stages
    costs = [
        stage_cost(profile, a, b, num_microbatches=count, parameter_copies=parameter_copies) for a, b in plan.bounds()
    ]
    events = _play(costs, plan, link)
    step_s = max(event.end_s for event in events)
    busy = sum(e.end_s - e.start_s for e in events if e.kind in ("forward", "backward"))
    return Simulation(
        step_s=step_s,
        bubble=1.0 - busy / (num_stages * step_s) if step_s else 0.0,
        peak_memory_bytes=tuple(_peak(s, cost, events) for s, cost in enumerate(costs)),
        link_bytes=tuple(2 * count * cost.send_bytes for cost in costs),
        events=tuple(sorted(events, key=lambda e: (e.start_s, e.end_s, e.stage))),
    )


def _play(costs: list[StageCost], plan: Plan, link: Link) -> list[Event]:
    count, num_stages = plan.num_microbatches, plan.num_stages
    todo = [
        stage_order(s, num_stages=num_stages, num_microbatches=count, schedule=plan.schedule) for s in range(num_stages)
    ]
    ready: dict[tuple[str, int, int], float] = {("forward", 0, i): 0.0 for i in range(count)}
    free = [0.0] * num_stages
    link_free: dict[tuple[str, int], float] = {}
    events: list[Event] = []
    while any(todo):
        progressed = False
        for stage, order in enumerate(todo):
            while order and (order[0][0], stage, order[0][1]) in ready:
                kind, i = order.pop(0)
                start = max(free[stage], ready[kind, stage, i])
                took = costs[stage].forward_s if kind == "forward" else costs[stage].backward_s
                free[stage] = end = start + took
                events.append(Event(kind, stage, i, start, end))
                progressed = True
                last = stage == num_stages - 1
                if kind == "forward" and last:
                    ready["backward", stage, i] = end
                    continue
                if kind == "backward" and stage == 0:
                    continue
                target = stage + 1 if kind == "forward" else stage - 1
                send = "send" if kind == "forward" else "send_gradient"
                seconds = link.seconds(costs[min(stage, target)].send_bytes)
                begin = max(end, link_free.get((send, stage), 0.0))
                link_free[send, stage] = arrived = begin + seconds
                ready[kind, target, i] = arrived
                if seconds:
                    events.append(Event(send, stage, i, begin, arrived))
        assert progressed, "the schedule waits for itself"
    return events


def _peak(stage: int, cost: StageCost, events: list[Event]) -> int:
    changes = [(e.start_s, 1, 1) for e in events if e.kind == "forward" and e.stage == stage]
    changes += [(e.end_s, 0, -1) for e in events if e.kind == "backward" and e.stage == stage]
    held = peak = 0
    for _, _, change in sorted(changes):
        held += change
        peak = max(peak, held)
    return cost.static_bytes + peak * cost.flight_bytes
