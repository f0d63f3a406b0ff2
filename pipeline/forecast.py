"""The step that a plan expects, from the plan alone: the profile it was made from need not be kept."""

from __future__ import annotations

from dataclasses import replace

from pipeline.costs import Link
from pipeline.plan_file import Plan
from pipeline.profile import BlockProfile, Profile
from pipeline.simulate import Event, Simulation, simulate


def forecast(plan: Plan, *, link: Link | None = None) -> Simulation:
    """Play a step with the times and bytes that the plan names for its stages. Memory is not in it.

    Args:
        link: what the plan was made for; sending takes no time without it.

    Raises:
        ValueError: if the plan has no times (it was written by hand).
    """
    if not any(stage.forward_s for stage in plan.stages):
        raise ValueError("the plan has no times, so there is nothing to expect; make it with python -m pipeline.plan")
    blocks = tuple(
        BlockProfile(f"stage.{i}", stage.forward_s, stage.backward_s, 0, 0, 0, 0, "sample", False, "", {})
        for i, stage in enumerate(plan.stages)
    )
    sent = tuple(stage.send_bytes for stage in plan.stages)
    back = tuple(stage.return_bytes for stage in plan.stages)
    profile = Profile(blocks, sent, plan.num_microbatches, plan.num_microbatches, gradient_bytes=back)
    stages = tuple(replace(s, blocks=(b.name,)) for s, b in zip(plan.stages, blocks, strict=True))
    run = simulate(profile, replace(plan, stages=stages, recomputed=()), link=link)
    if not plan.reduce_s:
        return run
    step_s = run.step_s + plan.reduce_s
    reduces = tuple(Event("reduce", rank, 0, run.step_s, step_s) for rank in range(plan.num_ranks))
    return replace(run, step_s=step_s, bubble=1 - (1 - run.bubble) * run.step_s / step_s, events=run.events + reduces)
