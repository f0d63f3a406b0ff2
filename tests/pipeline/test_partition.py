"""The partition against brute force over all cuts."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from pipeline import Profile, partition, simulate
from pipeline.costs import Link, in_flight, stage_cost
from pipeline.trace import BlockProfile


def random_profile(n: int, num_microbatches: int, rng: random.Random) -> Profile:
    def block(i: int) -> BlockProfile:
        ties = {"t": 50} if rng.random() < 0.4 else {}
        sizes = rng.randrange(50, 100), rng.randrange(100), rng.randrange(100)
        # Few distinct times, so that ties between plans happen.
        times = rng.choice([1.0, 2.0, rng.random()]), rng.choice([2.0, rng.random()])
        return BlockProfile(f"b.{i}", *times, 0, *sizes, "sample", False, "", ties)

    carry = tuple(rng.choice([0, 10, 100, rng.randrange(1000)]) for _ in range(n - 1))
    return Profile(tuple(block(i) for i in range(n)), (*carry, 0), num_microbatches, num_microbatches)


def stage_values(profile: Profile, bounds: tuple[int, ...], schedule: str, link: Link) -> tuple[list[float], list[int]]:
    times, memory = [], []
    for s, (a, b) in enumerate(itertools.pairwise(bounds)):
        cost = stage_cost(profile, a, b, num_microbatches=profile.num_microbatches, parameter_copies=4.0)
        sends = 2 * link.seconds(cost.send_bytes)
        times.append(cost.forward_s + cost.backward_s + sends)
        flights = in_flight(s, num_stages=len(bounds) - 1, num_microbatches=profile.num_microbatches, schedule=schedule)
        memory.append(cost.static_bytes + flights * cost.flight_bytes)
    return times, memory


@pytest.mark.parametrize("objective", ["speed", "memory"])
def test_equals_brute_force(objective: str) -> None:
    rng = random.Random(1)
    infeasible = 0
    for _ in range(250):
        n, m = rng.randint(1, 8), rng.randint(1, 6)
        schedule = rng.choice(["gpipe", "1f1b"])
        num_stages = rng.randint(1, min(n, m) if schedule == "1f1b" else n)
        profile = random_profile(n, m, rng)
        link = Link(rng.choice([0.0, 0.5]), rng.choice([float("inf"), 100.0, 1000.0]))
        pins = [p for p in rng.sample(range(1, n), min(n - 1, rng.randint(0, 2)))][: num_stages - 1]
        options = []
        for cuts in itertools.combinations(range(1, n), num_stages - 1):
            if set(pins) <= set(cuts):
                times, memory = stage_values(profile, (0, *cuts, n), schedule, link)
                options.append((sum(times) + (m - 1) * max(times), max(memory)))
        capacity = rng.choice([None, rng.uniform(0.7, 1.2) * rng.choice(options)[1]])
        fits = [o for o in options if capacity is None or o[1] <= capacity]

        def plan(p=profile, s=num_stages, sch=schedule, m=m, cap=capacity, link=link, pins=pins):  # type: ignore[no-untyped-def]
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
            )

        if not fits:
            infeasible += 1
            with pytest.raises(ValueError, match=rf"would do is {min(o[1] for o in options)} bytes"):
                plan()
            continue
        found = plan()
        bounds = (0, *(last for _, last in found.bounds()))
        times, memory = stage_values(profile, bounds, schedule, link)
        if objective == "memory":
            assert max(memory) == min(o[1] for o in fits)
            fits = [o for o in fits if o[1] == max(memory)]
        assert sum(times) + (m - 1) * max(times) == pytest.approx(min(o[0] for o in fits), rel=1e-12)
        # The simulation finds the same memory, event by event.
        assert [s.memory_bytes for s in found.stages] == memory
    assert infeasible > 10


def test_400_blocks_on_16_stages_take_less_than_5_seconds() -> None:
    profile = random_profile(400, 32, random.Random(2))
    start = time.monotonic()
    partition(profile, num_stages=16, schedule="1f1b", num_microbatches=32, link_bytes_per_s=500.0)
    assert time.monotonic() - start < 5


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


def test_simulation_of_equal_stages_has_the_bubble_of_the_papers() -> None:
    """(S - 1) / (M + S - 1) for equal stages without communication (Huang et al. 2019, section 2.3)."""
    block = BlockProfile("b.0", 1.0, 2.0, 0, 0, 10, 0, "sample", False, "", {})
    blocks = tuple(BlockProfile(**{**vars(block), "name": f"b.{i}"}) for i in range(4))
    profile = Profile(blocks, (0, 0, 0, 0), 8, 8)
    for schedule, peaks in (("gpipe", (80, 80, 80, 80)), ("1f1b", (40, 30, 20, 10))):
        plan = partition(profile, num_stages=4, schedule=schedule, num_microbatches=8)
        run = simulate(profile, plan)
        assert run.bubble == pytest.approx(3 / 11)
        assert run.step_s == pytest.approx(3.0 * 11) == plan.step_s
        assert run.peak_memory_bytes == peaks
    assert simulate(profile, plan, link=Link(latency_s=1.0)).step_s == run.step_s  # nothing to send
