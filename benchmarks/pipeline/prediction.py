"""Predicted against measured: step time, and peak memory of each rank in live tensor bytes.

    python -m benchmarks.pipeline.prediction [--rounds N] [--out FILE] [--pictures FOLDER]

Two ranks, gpipe, 1f1b and interleaved. Memory is counted in a run of its own, because counting takes time: parameters
here, and every tensor made from building the pipeline to the end of the second step. There is no optimiser, so the
prediction counts each parameter twice (itself and its gradient).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from benchmarks.pipeline.measuring import LiveBytes, busy_profile, in_turn, machine, measured_link, options, report
from benchmarks.pipeline.models import Sizes, unequal_batch, unequal_program
from pipeline import Pipeline, partition, simulate
from pipeline.costs import Link
from pipeline.heap import keep_freed_memory
from pipeline.timeline import Event, write_timeline
from tests.distributed import run_on_ranks

SIZES = Sizes()
RANKS, MICROBATCHES = 2, 8
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2}


def on_rank(rounds: int) -> tuple[list[dict[str, Any]], Link, dict[str, dict[str, Sequence[Event]]]]:
    """The rows of the table, the link that was measured, and predicted and measured events by schedule."""
    keep_freed_memory()  # as training ranks do
    program, batch = unequal_program(SIZES), unequal_batch(SIZES, MICROBATCHES)
    profile, link = busy_profile(program, batch, num_microbatches=MICROBATCHES), measured_link()
    plans = {
        schedule: partition(
            profile,
            num_stages=RANKS * chunks,
            num_ranks=RANKS,
            schedule=schedule,
            num_microbatches=MICROBATCHES,
            link_latency_s=link.latency_s,
            link_bytes_per_s=link.bytes_per_s,
        )
        for schedule, chunks in CHUNKS.items()
    }
    pipelines = {name: Pipeline(program, plan) for name, plan in plans.items()}

    def step(pipeline: Pipeline) -> None:
        pipeline.step(batch, seed=0, step=1)
        program.zero_grad(set_to_none=True)

    times = in_turn({name: partial(step, pipeline) for name, pipeline in pipelines.items()}, rounds=rounds)
    rows, events = [], {}
    for schedule, plan in plans.items():
        run = simulate(profile, plan, link=link, parameter_copies=2.0)
        with LiveBytes() as live:
            pipeline = Pipeline(program, plan, record=True)
            parameters = sum(p.numel() * p.element_size() for p in pipeline.parameters_here.values())
            step(pipeline)
            step(pipeline)
        peaks: list[Any] = [None] * RANKS
        dist.all_gather_object(peaks, parameters + live.peak)
        measured = statistics.median(times[schedule])
        row = {
            "schedule": schedule,
            "measured ms": 1e3 * measured,
            "predicted ms": 1e3 * run.step_s,
            "predicted / measured": run.step_s / measured,
        }
        for rank, (theirs, peak) in enumerate(zip(run.rank_memory_bytes, peaks, strict=True)):
            row[f"rank {rank} MiB"] = peak / 2**20
            row[f"rank {rank} predicted / measured"] = theirs / peak
        rows.append(row)
        step(pipeline)  # not counting, which takes time
        step(pipeline)
        timed = simulate(profile, plan, link=link)
        events[schedule] = {"predicted": timed.events, "measured": pipeline.events()}
        del pipeline
    return rows, link, events


def main() -> None:
    given = options("prediction", "predicted against measured step time and memory", pictures=True)
    results: dict[str, Any] = {"machine": machine(), "microbatches": MICROBATCHES, "ranks": RANKS}
    rows, link, events = run_on_ranks(on_rank, RANKS, given.rounds, timeout_s=1800)[0]
    results["link"] = {"latency_s": link.latency_s, "bytes_per_s": link.bytes_per_s}
    if given.pictures:
        given.pictures.mkdir(parents=True, exist_ok=True)
        for schedule, runs in events.items():
            write_timeline(given.pictures / f"step-{schedule}.png", runs, num_ranks=RANKS)
    report(given, results, rows, "Predicted against measured, 2 ranks")


if __name__ == "__main__":
    main()
