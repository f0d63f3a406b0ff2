"""What a plan expects is what its profile said."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pipeline import Plan, partition, simulate
from pipeline.costs import Link
from pipeline.forecast import forecast
from tests.pipeline.fid_program import fid_program
from tests.pipeline.test_partition import random_profile


@pytest.mark.parametrize(("schedule", "stages", "ranks"), [("gpipe", 3, 3), ("1f1b", 3, 3), ("interleaved", 4, 2)])
def test_a_plan_alone_gives_the_step_of_its_profile(schedule: str, stages: int, ranks: int) -> None:
    profile = random_profile(7, 4, random.Random(5))
    plan = partition(profile, num_stages=stages, num_ranks=ranks, schedule=schedule, num_microbatches=4)
    again = forecast(Plan.from_json(plan.to_json()))
    right = simulate(profile, plan)
    assert again.step_s == pytest.approx(right.step_s)
    assert [(e.kind, e.stage, e.microbatch) for e in again.events if e.kind == "forward"] == [
        (e.kind, e.stage, e.microbatch) for e in right.events if e.kind == "forward"
    ]


@pytest.mark.parametrize(("schedule", "stages", "ranks"), [("1f1b", 3, 3), ("interleaved", 4, 2)])
def test_with_its_link_a_plan_s_step_is_the_one_that_it_names(schedule: str, stages: int, ranks: int) -> None:
    profile, link = random_profile(7, 4, random.Random(5)), Link(0.1, 100.0)
    profile = replace(profile, carry_bytes=(400,) * 6 + (0,), gradient_bytes=(100,) * 6 + (0,))
    plan = partition(
        profile, num_stages=stages, num_ranks=ranks, schedule=schedule, num_microbatches=4,
        link_latency_s=link.latency_s, link_bytes_per_s=link.bytes_per_s,
    )  # fmt: skip
    right = simulate(profile, plan, link=link)
    again = forecast(Plan.from_json(plan.to_json()), link=link)
    assert plan.reduce_s > 0 and plan.step_s == right.step_s
    assert (again.step_s, again.bubble) == pytest.approx((right.step_s, right.bubble))
    assert again.events[-1].end_s == pytest.approx(right.events[-1].end_s)
    assert forecast(plan).step_s < again.step_s


def test_a_plan_without_times_is_refused() -> None:
    with pytest.raises(ValueError, match="has no times"):
        forecast(Plan.from_cuts(fid_program(), [2], schedule="gpipe"))
