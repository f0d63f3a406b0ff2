"""Where to cut, and what to compute again instead of sending it.

One chunk of blocks a rank (``gpipe``, ``1f1b``). Objective ``speed`` minimises ``sum of stage times + (M - 1) *
slowest stage`` (Huang et al., GPipe, 2019; the time of both schedules here) plus the all-reduce of parameters that
several ranks hold; a stage's time is its forward, backward and the sending of its carry there and back.
``memory`` minimises the largest peak memory of a rank, then the time. Both are exact (`pipeline.cut_search`), with
tied parameters too: whether a group of them is split depends only on whether a cut falls between its first and
last holder, so the search is done once for each set of groups kept together. That is exact up to
four such groups; beyond, each alone and the largest ones together are tried. A second or so for 400
blocks on 16 stages and one such set.

Several chunks a rank (``interleaved``), and ``zero_bubble``: no formula; candidates come from the exact search, equal
parts and memory, and are improved step by step, each scored by simulation (`pipeline.neighbourhood`). The gap to
trying everything is in docs/pipeline.md. Small models are tried in full.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from pipeline.baselines import equal_bounds
from pipeline.costs import Beside, Bounds, Costs, Link
from pipeline.cut_search import fastest, search, smallest_peak
from pipeline.neighbourhood import best_bounds
from pipeline.order import held, is_looped, step_order
from pipeline.plan_file import Plan, check_schedule
from pipeline.program import nearest
from pipeline.recomputation import choose
from pipeline.simulate import play, predicted, rank_memory, rank_static
from pipeline.trace import Profile

EXACT_TIES = 4  # groups of tied parameters that are searched in full
PLAYED_ACTIONS = 1_000_000  # simulated for one interleaved plan, about: a second or two
ALL_CUTS = 2000  # interleaved plans with no more choices of cuts than this are all tried


class CapacityError(ValueError):
    """No cut fits into the capacity.

    Attributes:
        smallest: bytes a rank that would do.
    """

    def __init__(self, message: str, *, smallest: int) -> None:
        super().__init__(message)
        self.smallest = smallest


@dataclass(frozen=True)
class _Task:
    profile: Profile
    num_stages: int
    num_ranks: int
    schedule: str
    num_microbatches: int
    objective: str
    capacity_bytes: float
    link: Link
    parameter_copies: float
    pins: tuple[int, ...]
    beside: tuple[Beside, ...]  # by rank

    def allowed(self, costs: Costs) -> np.ndarray:
        """Stages without a pinned cut inside, and without a cut through memory that several blocks share in part."""
        allowed = np.isfinite(costs.time_s)
        for cut in self.pins:
            allowed[:cut, cut + 1 :] = False
        for cut in _forbidden(self.profile):
            allowed[cut, :] = allowed[:, cut] = False
        return allowed

    def score(self, peak: float, time_s: float) -> tuple[float, float]:
        """Smaller is better; with a capacity, the first entry says by how much it is exceeded."""
        if self.objective == "memory":
            return (peak, time_s)
        return (max(0.0, peak - self.capacity_bytes), time_s)


def partition(
    profile: Profile,
    *,
    num_stages: int,
    schedule: str,
    num_microbatches: int,
    num_ranks: int | None = None,
    objective: str = "speed",
    capacity_bytes: float | None = None,
    link_latency_s: float = 0.0,
    link_bytes_per_s: float = float("inf"),
    pins: Sequence[str] = (),
    parameter_copies: float = 4.0,
    beside: Sequence[Beside] = (),
) -> Plan:
    """The best plan. ``step_s``, ``bubble`` and ``memory_bytes`` come from simulating it.

    Args:
        num_stages: in all; a multiple of ``num_ranks`` for ``interleaved`` and ``zero_bubble``.
        num_ranks: of the pipeline (None: one a stage).
        capacity_bytes: most memory a rank may need (None: any).
        pins: blocks that must be the first of their stage.
        parameter_copies: bytes kept for each byte of parameters (see `pipeline.costs`).
        beside: what each rank holds for something else, which counts for the capacity and for ``memory`` (not in the
            plan's figures); empty: nothing.

    Raises:
        ValueError: if the profile is no measurement, or nothing fits.
        CapacityError: nothing fits into the capacity; says the smallest one that would do.
    """
    n = len(profile.blocks)
    _check(profile)
    cuts = _pinned(profile, pins, num_stages)
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
    if capacity_bytes is not None and not capacity_bytes > 0:
        raise ValueError(f"capacity_bytes is {capacity_bytes}; it must be above 0 (or None)")
    num_ranks = num_stages if num_ranks is None else num_ranks
    check_schedule(schedule, num_microbatches=num_microbatches, num_ranks=num_ranks, num_stages=num_stages)
    if beside and len(beside) != num_ranks:
        raise ValueError(f"beside says what {len(beside)} ranks hold, but num_ranks is {num_ranks}")
    link = Link(link_latency_s, link_bytes_per_s)
    capacity = math.inf if capacity_bytes is None else capacity_bytes
    task = _Task(
        profile, num_stages, num_ranks, schedule, num_microbatches, objective, capacity, link, parameter_copies,
        tuple(cuts), tuple(beside) or (Beside(),) * num_ranks,
    )  # fmt: skip
    peak, bounds, recomputed = choose(profile, lambda some: _evaluate(task, some))
    if peak > capacity:
        most = max((b.static_bytes for b in beside), default=0)
        raise CapacityError(
            f"no cut into {num_stages} stages fits into {int(capacity)} bytes a rank"
            + (f", of which up to {most} are taken beside the pipeline" if most else "")
            + f"; the smallest capacity that would do is {int(peak)} bytes (or use more stages, or smaller "
            "micro-batches)",
            smallest=int(peak),
        )
    return predicted(
        profile,
        bounds,
        schedule=schedule,
        num_ranks=num_ranks,
        recomputed=recomputed,
        link=link,
        parameter_copies=parameter_copies,
    )


def _check(profile: Profile) -> None:
    for block in profile.blocks:
        for field in (
            "forward_s", "backward_s", "flops", "parameter_bytes", "activation_bytes", "written_bytes"
        ):  # fmt: skip
            value = getattr(block, field)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"the profile's block {block.name!r} has {field} {value}; it must be 0 or more; trace again"
                )
    for i, size in enumerate(profile.carry_bytes):
        if not (math.isfinite(size) and size >= 0):
            raise ValueError(f"the profile's carry_bytes[{i}] is {size}; it must be 0 or more; trace again")


def _pinned(profile: Profile, pins: Sequence[str], num_stages: int) -> list[int]:
    names = [block.name for block in profile.blocks]
    for pin in pins:
        if pin not in names:
            raise ValueError(f"pins names unknown block {pin!r}{nearest(pin, names)}")
    cuts = sorted({names.index(pin) for pin in pins} - {0})
    if len(cuts) > num_stages - 1:
        raise ValueError(
            f"{len(cuts)} pinned cuts need {len(cuts) + 1} stages, but num_stages is {num_stages}; pin fewer"
        )
    forbidden = _forbidden(profile)
    for cut in cuts:
        if cut in forbidden:
            raise ValueError(
                f"pins names block {names[cut]!r}, but no stage may begin there: blocks on both sides hold parts of "
                f"the memory of {forbidden[cut]!r}; pin another"
            )
    if num_stages <= len(names) and num_stages - 1 > len(names) - 1 - len(forbidden):
        raise ValueError(
            f"num_stages is {num_stages}; at most {len(names) - len(forbidden)} are possible, because blocks that "
            f"hold parts of one memory ({', '.join(sorted(set(forbidden.values())))}) stay on one stage"
        )
    return cuts


def _forbidden(profile: Profile) -> dict[int, str]:
    """Cuts between blocks that hold parts of one storage as different tensors: cut -> the storage's parameter."""
    spans: dict[str, tuple[int, int]] = {}
    for i, block in enumerate(profile.blocks):
        for name in block.partial_ties:
            spans[name] = (spans.get(name, (i, i))[0], i)
    return {cut: name for name, (first, last) in spans.items() for cut in range(first + 1, last + 1)}


def _evaluate(
    task: _Task, recomputed: tuple[str, ...]
) -> tuple[tuple[float, float], tuple[float, Bounds, tuple[str, ...]]]:
    """(score, (peak memory, bounds, recomputed)) of the best cuts for a choice of recomputed blocks."""
    costs = Costs(task.profile, link=task.link, parameter_copies=task.parameter_copies, recomputed=recomputed)
    find = _simulated if is_looped(task.schedule) else _one_chunk
    score, peak, bounds = find(task, costs)
    return score, (peak, bounds, recomputed)


def _one_chunk(task: _Task, costs: Costs) -> tuple[tuple[float, float], float, Bounds]:
    allowed, weighs = task.allowed(costs), task.objective == "memory" or math.isfinite(task.capacity_bytes)
    masks, limited, peak = [allowed] * task.num_stages, task.objective == "memory", 0.0
    if weighs:
        memory = [np.where(allowed, table, np.inf) for table in _stage_memory(task, costs)]
        peak, bounds = smallest_peak(memory)
        if peak > task.capacity_bytes:
            return task.score(peak, _formula(task, costs, bounds)), peak, bounds
        masks = [table <= (peak if limited else task.capacity_bytes) for table in memory]
    options = [bounds for bounds in _with_ties(task, costs, masks) if bounds]
    best = min(options, key=lambda bounds: (_formula(task, costs, bounds), bounds))
    return task.score(peak, _formula(task, costs, best)), peak, best


def _stage_memory(task: _Task, costs: Costs) -> Iterator[np.ndarray]:
    for rank, beside in enumerate(task.beside):
        ((flights,),) = held(
            rank,
            num_ranks=task.num_ranks,
            num_stages=task.num_stages,
            num_microbatches=task.num_microbatches,
            schedule=task.schedule,
        )
        yield np.maximum(costs.memory(flights), costs.static_bytes + beside.working_bytes) + beside.static_bytes


def _formula(task: _Task, costs: Costs, bounds: Bounds) -> float:
    times = [float(costs.time_s[a, b]) for a, b in pairwise(bounds)]
    pipeline = sum(times) + (task.num_microbatches - 1) * max(times)
    return pipeline + costs.tie_seconds(bounds, num_ranks=task.num_ranks)


def _with_ties(task: _Task, costs: Costs, masks: Sequence[np.ndarray]) -> Iterator[Bounds]:
    """Fastest bounds for sets of tied parameters kept on one stage; the first set is empty."""
    yield fastest(costs.time_s, masks, task.num_microbatches)
    sizes: dict[tuple[int, int], int] = {}
    for group in costs.shared:
        if group.trained and group.first < group.last and task.link.seconds(group.num_bytes):
            span = (group.first, group.last)
            sizes[span] = sizes.get(span, 0) + group.num_bytes
    spans = sorted(sizes, key=lambda span: -sizes[span])
    if len(spans) <= EXACT_TIES:
        sets = [s for size in range(1, len(spans) + 1) for s in combinations(spans, size)]
    else:
        sets = list(
            dict.fromkeys([*((span,) for span in spans), *(tuple(spans[:i]) for i in range(2, len(spans) + 1))])
        )
    for some in sets:
        whole = np.ones_like(masks[0])
        for first, last in some:  # no cut c with first < c <= last: no stage starts or ends there
            whole[first + 1 : last + 1, :] = False
            whole[:, first + 1 : last + 1] = False
        yield fastest(costs.time_s, [mask & whole for mask in masks], task.num_microbatches)


def _simulated(task: _Task, costs: Costs) -> tuple[tuple[float, float], float, Bounds]:
    order = step_order(
        num_ranks=task.num_ranks,
        num_stages=task.num_stages,
        num_microbatches=task.num_microbatches,
        schedule=task.schedule,
    )
    weighs = task.objective == "memory" or math.isfinite(task.capacity_bytes)

    def peak(bounds: Bounds) -> float:
        whole = rank_memory(
            costs, bounds, num_ranks=task.num_ranks, num_microbatches=task.num_microbatches, schedule=task.schedule
        )
        stages = list(pairwise(bounds))
        ranks = [
            max(most, rank_static(costs, stages[rank :: task.num_ranks]) + beside.working_bytes) + beside.static_bytes
            for rank, (most, beside) in enumerate(zip(whole, task.beside, strict=True))
        ]
        return float(max(ranks))

    def score(bounds: Bounds) -> tuple[float, float]:
        stages = list(pairwise(bounds))
        time_s = play(
            order,
            forward_s=[float(costs.forward_s[a, b]) for a, b in stages],
            backward_s=[float(costs.backward_s[a, b]) for a, b in stages],
            overlaps=True,
            splits=task.schedule == "zero_bubble",
            send_s=[float(costs.send_s[b]) for _, b in stages],
            return_s=[float(costs.return_s[b]) for _, b in stages],
            num_ranks=task.num_ranks,
        )
        time_s += costs.tie_seconds(bounds, num_ranks=task.num_ranks)
        return task.score(peak(bounds) if weighs else 0.0, time_s)

    allowed = task.allowed(costs)
    found = best_bounds(
        score,
        [bounds for bounds in _starts(task, costs, allowed) if bounds],
        allowed=allowed,
        num_stages=task.num_stages,
        budget=max(100, PLAYED_ACTIONS // len(order)),
        exhaustive=ALL_CUTS,
    )
    return score(found), peak(found) if weighs else 0.0, found


def _starts(task: _Task, costs: Costs, allowed: np.ndarray) -> Iterator[Bounds]:
    masks = [allowed] * task.num_stages
    yield from _with_ties(task, costs, masks)
    yield search(costs.time_s, masks, minimax=True)[1]
    computing = costs.forward_s + costs.backward_s
    yield search(np.where(allowed, computing, np.inf), masks, minimax=True)[1]
    yield smallest_peak([np.where(allowed, costs.memory(1), np.inf)] * task.num_stages)[1]
    equal = equal_bounds(len(task.profile.blocks), task.num_stages)
    if all(allowed[a, b] for a, b in pairwise(equal)):
        yield equal
