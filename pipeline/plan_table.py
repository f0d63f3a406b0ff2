"""A plan for people: a table of its stages, what cuts by hand would take, and how far to trust the times."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from pipeline.baselines import equal_blocks, equal_parameters
from pipeline.busy import num_busy
from pipeline.cluster import Cluster
from pipeline.config import ParallelConfig
from pipeline.plan_file import Plan
from pipeline.simulate import Simulation, simulate
from pipeline.trace import Profile


def print_tables(plan: Plan, profile: Profile, run: Simulation, cluster: Cluster, parallel: ParallelConfig) -> None:
    """Print a plan to stdout, its simulation, and what micro-batches would make of blocks that mix samples.

    Args:
        parallel: the layout asked for, for the number of replicas.
    """
    console = Console()
    ranks = f" on {plan.num_ranks} ranks" if plan.num_ranks != plan.num_stages else ""
    table = Table(title=f"{plan.num_stages} stages{ranks}, {plan.schedule}, {plan.num_microbatches} micro-batches")
    for name in ("stage", "rank", "blocks", "forward ms", "backward ms", "memory MiB", "send KiB"):
        table.add_column(name, justify="left" if name == "blocks" else "right")
    for i, (stage, memory) in enumerate(zip(plan.stages, run.peak_memory_bytes, strict=True)):
        names = stage.blocks if len(stage.blocks) < 4 else (stage.blocks[0], "...", stage.blocks[-1])
        table.add_row(
            str(i),
            str(i % plan.num_ranks),
            f"{', '.join(names)} ({len(stage.blocks)})",
            f"{stage.forward_s * 1e3:.2f}",
            f"{stage.backward_s * 1e3:.2f}",
            f"{memory / 2**20:.2f}",
            f"{stage.send_bytes / 2**10:.2f}",
        )
    console.print(table)
    console.print(f"step {run.step_s * 1e3:.2f} ms, bubble {run.bubble:.1%}, plan {plan.hash}", highlight=False)
    if plan.recomputed:
        console.print(f"computed again where they are read: {', '.join(plan.recomputed)}", highlight=False)
    if run.tie_bytes:
        console.print(f"tied over ranks: {run.tie_bytes / 2**20:.2f} MiB, all-reduced once a step", highlight=False)
    _print_comparison(console, plan, profile, run, cluster)
    if cluster.device:
        console.print(
            f"times are predicted for {profile.device}; whether blocks mix samples was not looked at", highlight=False
        )
        return
    num_ranks = plan.num_ranks * parallel.data_replicas
    if num_ranks > 1:
        busy = num_busy(num_ranks)
        traced = f"traced with {busy} ranks busy at once" if busy > 1 else "traced in one process"
        few = "" if busy == num_ranks else (
            f" of {num_ranks}, as many as this machine has cores for: too low where more share its caches and memory"
        )  # fmt: skip
        console.print(traced + few, highlight=False, soft_wrap=True)
    for block in profile.blocks:
        if block.mixes or block.stateful:
            why = f"mixes samples ({block.lineage}): {block.mixes}" if block.mixes else "changes buffers"
            console.print(f"warning: block {block.name!r} {why}; training would refuse it", highlight=False)


def _print_comparison(console: Console, plan: Plan, profile: Profile, run: Simulation, cluster: Cluster) -> None:
    table = Table(title="predicted, against cuts by hand")
    for name in ("cut", "blocks", "step ms", "ratio", "bubble", "largest MiB"):
        words = name in ("cut", "blocks")
        table.add_column(name, justify="left" if words else "right", no_wrap=name != "blocks")
    rows = {"this plan": plan}
    for title, make in (("equal blocks", equal_blocks), ("equal parameters", equal_parameters)):
        rows[title] = make(
            profile, num_stages=plan.num_stages, schedule=plan.schedule, num_ranks=plan.num_ranks, link=cluster.link
        )
    for title, other in rows.items():
        theirs = simulate(profile, other, link=cluster.link)
        table.add_row(
            title,
            " ".join(str(len(stage.blocks)) for stage in other.stages),
            f"{theirs.step_s * 1e3:.2f}",
            f"{theirs.step_s / run.step_s:.2f}",
            f"{theirs.bubble:.1%}",
            f"{max(theirs.rank_memory_bytes) / 2**20:.2f}",
        )
    console.print(table)
