"""Interleaved plans: the order is the library's, the simulation a longest path, the search close to brute force."""

from __future__ import annotations

import itertools
import random
import statistics
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from pipeline import Plan, Profile, partition, simulate
from pipeline.costs import Beside, Costs, Link
from pipeline.order import rank_order, step_order
from pipeline.plan_file import StagePlan
from pipeline.simulate import play, rank_memory
from tests.pipeline.profiles import block_profile, random_profile, recomputed_sets, slow_stages, slow_tie_seconds

LAYOUTS = [(r, c, m) for r in range(1, 5) for c in (1, 2, 3) for m in range(1, 11) if m % max(1, m // r) == 0]


class FakeStage(SimpleNamespace):
    """What the library asks of a stage, without computing: it notes the order of the calls."""

    def __init__(self, index: int, num_stages: int, num_ranks: int) -> None:
        super().__init__(
            stage_index=index, num_stages=num_stages, group_size=num_ranks, group_rank=index % num_ranks,
            has_backward=False, group=None, submod=None, is_first=index == 0, is_last=index == num_stages - 1,
        )  # fmt: skip
        self.order: list[tuple[str, int, int]] = []

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.order.append(("forward", self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch: int, **kwargs: Any) -> None:
        self.order.append(("backward", self.stage_index, microbatch))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("get_"):
            return lambda *args: []
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


@pytest.mark.parametrize(
    ("name", "library"), [("interleaved", ScheduleInterleaved1F1B), ("zero_bubble", ScheduleInterleavedZeroBubble)]
)
def test_looped_orders_are_the_library_s(name: str, library: Any) -> None:
    kinds = {
        "FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "backward",
        "BACKWARD_WEIGHT": "backward_weight",
    }  # fmt: skip
    for ranks, chunks, count in LAYOUTS:
        stages: list[Any] = [FakeStage(c * ranks, chunks * ranks, ranks) for c in range(chunks)]
        schedule = library(stages, count, scale_grads=False)
        for rank in range(ranks):
            theirs = [
                (kinds[a.computation_type.name], a.stage_index, a.microbatch_index)
                for a in schedule.pipeline_order[rank]
                if a is not None and a.computation_type.name in kinds
            ]
            ours = rank_order(rank, num_ranks=ranks, num_stages=ranks * chunks, num_microbatches=count, schedule=name)
            assert [tuple(action) for action in ours] == theirs


@pytest.mark.parametrize(("name", "library"), [("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)])
def test_orders_of_one_stage_a_rank_are_what_the_library_runs(name: str, library: Any) -> None:
    for ranks, count in itertools.product(range(1, 5), range(1, 8)):
        if name == "1f1b" and count < ranks:
            continue
        for rank in range(ranks):
            stage: Any = FakeStage(rank, ranks, ranks)
            schedule = library(stage, count, scale_grads=False)
            schedule._initialize_stage = lambda *args: None
            schedule._step_microbatches([()] * count, [{}] * count)
            ours = rank_order(rank, num_ranks=ranks, num_stages=ranks, num_microbatches=count, schedule=name)
            assert [tuple(action) for action in ours] == stage.order


def slow_step(plan: Plan, costs: list[dict[str, float]]) -> float:
    """Longest path through what a rank does in its order and what waits for whom; sending takes no time."""
    before: dict[tuple[str, int, int], tuple[str, int, int]] = {}
    for rank in range(plan.num_ranks):
        order = rank_order(
            rank,
            num_ranks=plan.num_ranks,
            num_stages=plan.num_stages,
            num_microbatches=plan.num_microbatches,
            schedule=plan.schedule,
        )
        before.update({tuple(b): tuple(a) for a, b in itertools.pairwise(order)})  # type: ignore[misc]
    ends: dict[tuple[str, int, int], float] = {}

    def end(kind: str, stage: int, i: int) -> float:
        key = (kind, stage, i)
        if key not in ends:
            waits = [end(*before[key])] if key in before else []
            if kind == "forward" and stage:
                waits.append(end(kind, stage - 1, i))
            if kind == "backward_weight":
                waits.append(end("backward", stage, i))
            if kind == "backward":
                last = stage == plan.num_stages - 1
                waits.append(end("forward", stage, i) if last else end(kind, stage + 1, i))
            ends[key] = max(waits, default=0.0) + costs[stage][kind]
        return ends[key]

    return max(end(*action) for action in set(before) | set(before.values()))


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_the_simulation_is_the_longest_path(schedule: str) -> None:
    rng = random.Random(4)
    for ranks, chunks, count in LAYOUTS:
        profile = random_profile(ranks * chunks, count, rng)
        stages = tuple(StagePlan((b.name,)) for b in profile.blocks)
        plan = Plan(stages, schedule, count, num_ranks=ranks)
        times = []
        for s, b in enumerate(profile.blocks):
            weights = (b.backward_s / 2 if s else b.backward_s) if schedule == "zero_bubble" else 0.0
            times.append({"forward": b.forward_s, "backward": b.backward_s - weights, "backward_weight": weights})
        assert simulate(profile, plan).step_s == pytest.approx(slow_step(plan, times), rel=1e-12)


def test_a_link_carries_one_message_at_a_time() -> None:
    """Three micro-batches that take no time to compute and 1 s to send, there and back: 3 s and 3 s."""
    order = step_order(num_ranks=2, num_stages=2, num_microbatches=3, schedule="gpipe")
    how: dict[str, Any] = {
        "forward_s": [0.0] * 2,
        "backward_s": [0.0] * 2,
        "send_s": [1.0, 0.0],
        "return_s": [1.0, 0.0],
    }
    for overlaps in (True, False):
        assert play(order, num_ranks=2, overlaps=overlaps, **how) == 6.0


def test_equal_chunks_have_the_bubble_of_the_paper() -> None:
    """(R - 1) / (C M) of the computing time without it (Narayanan et al. 2021, section 2.2), and its memory."""
    for ranks, chunks, count in ((2, 2, 8), (4, 2, 8), (2, 3, 6)):
        blocks = tuple(block_profile(f"b.{i}", activation_bytes=10) for i in range(ranks * chunks))
        profile = Profile(blocks, (0,) * len(blocks), count, count)
        plan = partition(
            profile, num_stages=len(blocks), num_ranks=ranks, schedule="interleaved", num_microbatches=count
        )
        assert plan.step_s == pytest.approx(3.0 * chunks * count * (1 + (ranks - 1) / (chunks * count)))
        # Rank 0 warms up with (C - 1) R + 2 (R - 1) forwards and does one more before its first backward.
        most = min((chunks - 1) * ranks + 2 * (ranks - 1) + 1, chunks * count)
        assert simulate(profile, plan).rank_memory_bytes[0] == 10 * most


def test_zero_bubble_holds_until_the_weights_and_waits_less() -> None:
    """Three ranks of equal stages, forward 1, both halves of the backward 1: ZB1P, less than 1F1B's 3 (8 + 2) s."""
    blocks = tuple(block_profile(f"b.{i}", activation_bytes=10) for i in range(3))
    profile = Profile(blocks, (0,) * 3, 8, 8)
    plan = partition(profile, num_stages=3, schedule="zero_bubble", num_microbatches=8)
    run = simulate(profile, plan)
    assert 24 + 2 <= run.step_s < 30 and run.bubble < 2 / 10
    assert run.rank_memory_bytes == rank_memory(
        Costs(profile), (0, 1, 2, 3), num_ranks=3, num_microbatches=8, schedule="zero_bubble"
    )
    assert all(peak >= 10 * 3 for peak in run.rank_memory_bytes)  # as much as 1F1B's first rank, on all of them


def test_a_tie_between_chunks_of_one_rank_counts_once_and_is_not_reduced() -> None:
    def run(holders: tuple[int, int]) -> tuple[tuple[int, ...], int]:
        blocks = tuple(
            block_profile(f"b.{i}", parameter_bytes=100, ties={"t": 60} if i in holders else {}) for i in range(4)
        )
        profile = Profile(blocks, (0,) * 4, 4, 4)
        plan = Plan(tuple(StagePlan((b.name,)) for b in blocks), "interleaved", 4, num_ranks=2)
        result = simulate(profile, plan, link=Link(0.0, 60.0))
        assert result.step_s == pytest.approx(27.0 + 2 * result.tie_bytes / 60.0)
        return result.rank_memory_bytes, result.tie_bytes

    assert run((0, 2)) == ((4 * 140, 4 * 200), 0)  # stages 0 and 2 are both on rank 0
    assert run((0, 1)) == ((4 * 200, 4 * 200), 60)


@pytest.mark.parametrize("objective", ["speed", "memory"])
def test_gap_to_brute_force(objective: str, monkeypatch: pytest.MonkeyPatch, record_property: Any) -> None:
    """The search without trying everything, as it is for large models: usually best, never far off."""
    monkeypatch.setattr(sys.modules[partition.__module__], "ALL_CUTS", 0)
    rng = random.Random(5)
    gaps = []
    for _ in range(110):
        ranks, chunks = rng.choice([(2, 2), (2, 3), (3, 2)])
        n, count = rng.randint(ranks * chunks, 8), rng.choice([ranks, 2 * ranks])
        profile = random_profile(n, count, rng, num_recomputable=rng.choice([0, 1]))
        link = Link(rng.choice([0.0, 0.1]), rng.choice([float("inf"), 100.0, 1000.0]))
        how: dict[str, Any] = {"num_ranks": ranks, "schedule": "interleaved"}
        best = float("inf")
        for cuts in itertools.combinations(range(1, n), ranks * chunks - 1):
            for recomputed in recomputed_sets(profile):
                names = [profile.blocks[a:b] for a, b in itertools.pairwise((0, *cuts, n))]
                stages = tuple(StagePlan(tuple(b.name for b in some)) for some in names)
                plan = Plan(stages, "interleaved", count, num_ranks=ranks, recomputed=recomputed)
                run = simulate(profile, plan, link=link)
                best = min(best, run.step_s if objective == "speed" else max(run.rank_memory_bytes))
                slow = slow_stages(profile, (0, *cuts, n), recomputed, link)
                ties = slow_tie_seconds(slow, link, num_ranks=ranks)
                assert link.seconds(2 * run.tie_bytes) == pytest.approx(ties)
        found = partition(
            profile, num_stages=ranks * chunks, num_microbatches=count, objective=objective,
            link_latency_s=link.latency_s, link_bytes_per_s=link.bytes_per_s, **how,
        )  # fmt: skip
        run = simulate(profile, found, link=link)
        gaps.append((found.step_s if objective == "speed" else max(run.rank_memory_bytes)) / best - 1)
    record_property("gap", f"median {statistics.median(gaps):.4f}, worst {max(gaps):.4f}, exact {gaps.count(0.0)}")
    assert min(gaps) > -1e-9 and statistics.median(gaps) < 1e-9 and max(gaps) < 0.1


def test_capacity_counts_all_chunks_of_a_rank() -> None:
    blocks = tuple(block_profile(f"b.{i}", parameter_bytes=100) for i in range(4))
    profile = Profile(blocks, (0,) * 4, 4, 4)
    how: dict[str, Any] = {"num_stages": 4, "num_ranks": 2, "schedule": "interleaved", "num_microbatches": 4}
    assert partition(profile, capacity_bytes=800, **how).num_ranks == 2
    with pytest.raises(ValueError, match="would do is 800 bytes"):
        partition(profile, capacity_bytes=799, **how)
    beside = [Beside(static_bytes=7), Beside(static_bytes=5, working_bytes=50)]  # at least 5 + 800 + 50 on rank 1
    assert partition(profile, capacity_bytes=855, beside=beside, **how).num_ranks == 2
    with pytest.raises(ValueError, match=r"of which up to 7 are taken beside the pipeline; .* would do is 855 bytes"):
        partition(profile, capacity_bytes=854, beside=beside, **how)
