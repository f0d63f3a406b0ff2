"""The partition against brute force over all cuts and all choices of recomputed blocks."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pipeline import Profile, partition, simulate
from pipeline.costs import Beside, Link
from pipeline.trace import BlockProfile
from tests.pipeline.profiles import block_profile, random_profile, recomputed_sets, slow_stages, slow_tie_seconds


def slow_plan(
    profile: Profile,
    bounds: tuple[int, ...],
    recomputed: tuple[str, ...],
    schedule: str,
    link: Link,
    beside: Sequence[Beside],
) -> tuple[float, list[int], list[int]]:
    """Formula time, memory of each stage, and of each rank with what is beside it."""
    stages, m = slow_stages(profile, bounds, recomputed, link), profile.num_microbatches
    memory, ranks = [], []
    for s, stage in enumerate(stages):
        flights = m if schedule == "gpipe" else min(m, len(stages) - s)
        static, other = stage.parameter_memory + stage.buffer_bytes, beside[s]
        memory.append(static + flights * stage.flight_bytes)
        ranks.append(static + other.static_bytes + max(flights * stage.flight_bytes, other.working_bytes))
    times = [stage.time_s for stage in stages]
    ties = slow_tie_seconds(stages, link, num_ranks=len(stages))
    return sum(times) + (m - 1) * max(times) + ties, memory, ranks


@pytest.mark.parametrize("objective", ["speed", "memory"])
def test_equals_brute_force(objective: str) -> None:
    rng = random.Random(1)
    infeasible = recomputes = carries = 0
    for _ in range(200):
        n, m = rng.randint(1, 7), rng.randint(1, 6)
        schedule = rng.choice(["gpipe", "1f1b"])
        num_stages = rng.randint(1, min(n, m) if schedule == "1f1b" else n)
        profile = random_profile(n, m, rng, num_recomputable=rng.choice([0, 0, 1, 2]))
        link = Link(rng.choice([0.0, 0.5]), rng.choice([float("inf"), 20.0, 100.0, 1000.0]))
        pins = [p for p in rng.sample(range(1, n), min(n - 1, rng.randint(0, 2)))][: num_stages - 1]
        beside = [Beside(rng.randint(0, 300), rng.randint(0, 900)) for _ in range(num_stages)]
        if rng.random() < 0.5:
            beside = [Beside()] * num_stages
        options = []
        for cuts in itertools.combinations(range(1, n), num_stages - 1):
            if set(pins) <= set(cuts):
                for recomputed in recomputed_sets(profile):
                    time_s, _, ranks = slow_plan(profile, (0, *cuts, n), recomputed, schedule, link, beside)
                    options.append((time_s, max(ranks)))
        capacity = rng.choice([None, rng.uniform(0.7, 1.2) * rng.choice(options)[1]])
        fits = [o for o in options if capacity is None or o[1] <= capacity]

        def plan(p=profile, s=num_stages, sch=schedule, m=m, cap=capacity, link=link, pins=pins, beside=beside):  # type: ignore[no-untyped-def]
            return partition(
                p,
                num_stages=s,
                schedule=sch,
                num_microbatches=m,
                objective=objective,
                capacity_bytes=cap,
                link_latency_s=link.latency_s,
                link_bytes_per_s=link.bytes_per_s,
                pins=[f"b.{i}" for i in pins],
                beside=beside,
            )

        if not fits:
            infeasible += 1
            with pytest.raises(ValueError, match=rf"would do is {min(o[1] for o in options)} bytes"):
                plan()
            continue
        found = plan()
        bounds = (0, *(last for _, last in found.bounds()))
        time_s, memory, ranks = slow_plan(profile, bounds, found.recomputed, schedule, link, beside)
        if objective == "memory":
            assert max(ranks) == min(o[1] for o in fits)
            fits = [o for o in fits if o[1] == max(ranks)]
        assert time_s == pytest.approx(min(o[0] for o in fits), rel=1e-12)
        recomputes += bool(found.recomputed)
        carries += any(profile.recomputable_carries) and not found.recomputed
        # The simulation finds the same memory, event by event.
        assert [s.memory_bytes for s in found.stages] == memory
        assert simulate(profile, found, link=link).rank_memory_bytes == tuple(memory)
    assert infeasible > 10 and recomputes > 10 and carries > 10


def test_a_tie_that_is_dear_enough_pulls_its_blocks_together() -> None:
    """Blocks 0 and 2 of four equal ones share 100 bytes: apart, 2 x 100 bytes over the link; together, one more block.

    Two micro-batches, so the cut in the middle takes 6 + 6 + 6 s and that behind block 2 takes 9 + 3 + 9 s.
    """
    blocks = tuple(
        block_profile(f"b.{i}", parameter_bytes=100, ties={"t": 100} if i in (0, 2) else {}) for i in range(4)
    )
    profile = Profile(blocks, (0, 0, 0, 0), 2, 2)
    for bytes_per_s, sizes in ((100.0, [2, 2]), (50.0, [3, 1])):
        plan = partition(
            profile, num_stages=2, schedule="gpipe", num_microbatches=2, link_bytes_per_s=bytes_per_s
        )  # fmt: skip
        assert [len(stage.blocks) for stage in plan.stages] == sizes
        assert plan.step_s == pytest.approx(18.0 + 200 / bytes_per_s if sizes == [2, 2] else 21.0)
        assert simulate(profile, plan, link=Link(0.0, bytes_per_s)).tie_bytes == (100 if sizes == [2, 2] else 0)


def table_profile(*, cost_s: float, size: int) -> Profile:
    """Block 0 makes a table that blocks 1 and 3 read; the main carry is nothing."""
    blocks = tuple(
        block_profile(
            f"b.{i}", (cost_s, 3.0, 4.0, 2.0)[i], 0.0, recomputable=i == 0,
            reads=("table",) if i in (1, 3) else (), writes=("table",) if i == 0 else ("h",),
        )
        for i in range(4)
    )  # fmt: skip
    carries = ({"table": size}, {"table": size}, {"table": size}, {})
    return Profile(blocks, (size, size, size, 0), 4, 4, recomputable_carries=carries, outputs=("h",))


@pytest.mark.parametrize(("cost_s", "size", "recomputed"), [(0.1, 100, ("b.0",)), (2.0, 10, ())])
def test_what_is_cheap_is_computed_again_and_what_is_small_is_carried(
    cost_s: float, size: int, recomputed: tuple[str, ...]
) -> None:
    profile = table_profile(cost_s=cost_s, size=size)
    plan = partition(profile, num_stages=2, schedule="gpipe", num_microbatches=4, link_bytes_per_s=100.0)
    assert plan.recomputed == recomputed
    assert plan.stages[0].send_bytes == (0 if recomputed else size)
    assert plan.stages[1].forward_s == pytest.approx(6.0 + (cost_s if recomputed else 0.0))


@pytest.mark.parametrize(
    "how",
    [
        {"num_stages": 16, "schedule": "1f1b"},
        {"num_stages": 16, "schedule": "gpipe", "objective": "memory"},
        {"num_stages": 16, "schedule": "1f1b", "capacity_bytes": 60_000},
        pytest.param({"num_stages": 32, "num_ranks": 16, "schedule": "interleaved"}, marks=pytest.mark.slow),
    ],
)
def test_400_blocks_on_16_ranks_take_less_than_5_seconds(how: dict[str, Any]) -> None:
    profile = random_profile(400, 32, random.Random(2))
    start = time.process_time()
    plan = partition(profile, num_microbatches=32, link_bytes_per_s=500.0, **how)
    assert time.process_time() - start < 5 and plan.num_ranks == 16


def test_mistakes() -> None:
    profile = random_profile(4, 4, random.Random(3))
    with pytest.raises(ValueError, match="program of 4 blocks can have 1 to 4"):
        partition(profile, num_stages=5, schedule="gpipe", num_microbatches=4)
    with pytest.raises(ValueError, match="did you mean 'b"):
        partition(profile, num_stages=2, schedule="gpipe", num_microbatches=4, pins=["b.7"])
    with pytest.raises(ValueError, match="need 3 stages"):
        partition(profile, num_stages=2, schedule="gpipe", num_microbatches=4, pins=["b.1", "b.2"])
    with pytest.raises(ValueError, match="trace again"):
        partition(profile, num_stages=2, schedule="gpipe", num_microbatches=2)
    with pytest.raises(ValueError, match="1f1b needs at least"):
        partition(random_profile(4, 1, random.Random(3)), num_stages=2, schedule="1f1b", num_microbatches=1)
    with pytest.raises(ValueError, match="allowed: gpipe, 1f1b, interleaved"):
        partition(profile, num_stages=2, schedule="2f2b", num_microbatches=4)
    with pytest.raises(ValueError, match="needs a multiple of 2"):
        five = replace(profile, num_microbatches=5, num_samples=5)
        partition(five, num_stages=4, num_ranks=2, schedule="interleaved", num_microbatches=5)
    with pytest.raises(ValueError, match="do not divide over 2 ranks"):
        partition(profile, num_stages=3, num_ranks=2, schedule="interleaved", num_microbatches=4)
    with pytest.raises(ValueError, match="objective is 'sped'"):
        partition(profile, num_stages=2, schedule="gpipe", num_microbatches=4, objective="sped")
    with pytest.raises(ValueError, match="beside says what 1 ranks hold, but num_ranks is 2"):
        partition(profile, num_stages=2, schedule="gpipe", num_microbatches=4, beside=[Beside()])
    for capacity in (0.0, math.nan):
        with pytest.raises(ValueError, match="capacity_bytes is"):
            partition(profile, num_stages=2, schedule="gpipe", num_microbatches=4, capacity_bytes=capacity)


def test_messages_are_waited_for_or_overlap() -> None:
    """Two stages, forward 1 s, backward 2 s, sending .5 s, two micro-batches, counted by hand.

    gpipe: stage 1 computes from 1.5 to 2.5 and 3 to 4, then back 4 to 8; stage 0 then 6.5 to 8.5 and 9 to 11. The
    looped order is F0 F1 B0 B1 on rank 0 and F0 B0 F1 B1 on rank 1: 1.5 to 4.5 and 4.5 to 7.5 there, then 8 to 10.
    """
    profile = Profile((block_profile("b.0"), block_profile("b.1")), (50, 0), 2, 2)
    for schedule, step_s in (("gpipe", 11.0), ("interleaved", 10.0)):
        plan = partition(profile, num_stages=2, schedule=schedule, num_microbatches=2, link_bytes_per_s=100.0)
        assert plan.step_s == pytest.approx(step_s)
        run = simulate(profile, plan, link=Link(0.0, 100.0))
        assert run.link_bytes == (2 * 100, 0)
        assert sum(e.kind == "send" for e in run.events) == sum(e.kind == "send_gradient" for e in run.events) == 2


def test_blocks_that_hold_parts_of_one_memory_stay_on_one_stage() -> None:
    profile = random_profile(6, 4, random.Random(3))
    parts = [replace(b, partial_ties={"b.1.w": 8}) if i in (1, 3) else b for i, b in enumerate(profile.blocks)]
    profile = replace(profile, blocks=tuple(parts))
    for schedule, ranks, stages in (("gpipe", 4, 4), ("interleaved", 2, 4)):
        how = {"num_stages": stages, "num_ranks": ranks, "schedule": schedule, "num_microbatches": 4}
        plan = partition(profile, **how)  # type: ignore[arg-type]
        assert [stage.blocks for stage in plan.stages] == [("b.0",), ("b.1", "b.2", "b.3"), ("b.4",), ("b.5",)]
        with pytest.raises(ValueError, match=r"pins names block 'b\.2', but no stage may begin there"):
            partition(profile, pins=["b.2"], **how)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_stages is 5; at most 4 are possible"):
        partition(profile, num_stages=5, schedule="gpipe", num_microbatches=4)


def test_frozen_parameters_are_kept_once_and_not_reduced() -> None:
    def block(i: int, frozen: int) -> BlockProfile:
        return block_profile(f"b.{i}", parameter_bytes=100, ties={"t": 60}, frozen_bytes=frozen)

    for frozen, memory, tied in ((0, 400, 60), (40, 280, 60), (100, 100, 0)):
        profile = Profile((block(0, frozen), block(1, frozen)), (0, 0), 2, 2)
        plan = partition(profile, num_stages=2, schedule="gpipe", num_microbatches=2)
        assert [stage.memory_bytes for stage in plan.stages] == [memory, memory]
        assert simulate(profile, plan).tie_bytes == tied


@pytest.mark.parametrize(("field", "value"), [("forward_s", math.nan), ("backward_s", math.inf), ("backward_s", -1.0)])
def test_a_profile_that_is_no_measurement_names_the_block(field: str, value: float) -> None:
    profile = random_profile(4, 4, random.Random(3))
    blocks = (*profile.blocks[:2], replace(profile.blocks[2], **{field: value}), profile.blocks[3])
    with pytest.raises(ValueError, match=f"block 'b.2' has {field} {value}"):
        partition(replace(profile, blocks=blocks), num_stages=2, schedule="gpipe", num_microbatches=4)


def test_simulation_of_equal_stages_has_the_bubble_of_the_papers() -> None:
    """(S - 1) / (M + S - 1) for equal stages without communication (Huang et al. 2019, section 2.3)."""
    blocks = tuple(block_profile(f"b.{i}", activation_bytes=10) for i in range(4))
    profile = Profile(blocks, (0, 0, 0, 0), 8, 8)
    for schedule, peaks in (("gpipe", (80, 80, 80, 80)), ("1f1b", (40, 30, 20, 10))):
        plan = partition(profile, num_stages=4, schedule=schedule, num_microbatches=8)
        run = simulate(profile, plan)
        assert run.bubble == pytest.approx(3 / 11)
        assert run.step_s == pytest.approx(3.0 * 11) == plan.step_s
        assert run.peak_memory_bytes == peaks
    assert simulate(profile, plan, link=Link(latency_s=1.0)).step_s == run.step_s  # nothing to send
