"""How close a step comes to two ranks that compute without ever waiting or sending.

    python -m benchmarks.pipeline.efficiency [--rounds N] [--out FILE]

The ideal is the *twin*: both ranks run their own stages' forwards and backwards of all micro-batches at the same
time, in the schedule's order and without communication; times 9/8 (interleaved 17/16), the bubble that 8
micro-batches on 2 ranks cannot avoid. The ratio to one process is given too, against 16/9 (32/17), what two ranks
with a core each could gain.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.pipeline.measuring import busy_profile, in_turn, machine, median_ratio, options, report
from benchmarks.pipeline.models import equal_batch, equal_program
from pipeline import BlockProgram, Pipeline, Plan, partition
from pipeline.heap import keep_freed_memory
from pipeline.order import rank_order
from tests.distributed import run_on_ranks

RANKS, MICROBATCHES, SAMPLES, LAYERS, WIDTH, LENGTH = 2, 8, 32, 8, 256, 96
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2}


def twin(program: BlockProgram, plan: Plan, batch: dict[str, Tensor], rank: int) -> Any:
    """This rank's forwards and backwards in the schedule's order, on inputs and gradients that are there already."""
    rows = [program.microbatch(batch, i, MICROBATCHES) for i in range(MICROBATCHES)]
    bounds = plan.bounds()
    with torch.no_grad():
        carries = {
            (stage, i): program.run(row, 0, bounds[stage][0]) if bounds[stage][0] else {}
            for stage in plan.stages_of(rank)
            for i, row in enumerate(rows)
        }
    order = rank_order(
        rank, num_ranks=RANKS, num_stages=plan.num_stages, num_microbatches=MICROBATCHES, schedule=plan.schedule
    )

    def run() -> None:
        held: dict[tuple[int, int], list[Tensor]] = {}
        for kind, stage, i in order:
            if kind == "forward":
                leaves = {name: t.detach().requires_grad_() for name, t in carries[stage, i].items()}
                held[stage, i] = list(program.run({**rows[i], **leaves}, *bounds[stage]).values())
            else:
                outputs = held.pop((stage, i))
                torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
        program.zero_grad(set_to_none=True)

    return run


def on_rank(rounds: int) -> list[dict[str, Any]]:
    keep_freed_memory()  # as training ranks do
    program = equal_program(num_layers=LAYERS, width=WIDTH)
    batch = equal_batch(SAMPLES, length=LENGTH, width=WIDTH)
    profile = busy_profile(program, batch, num_microbatches=MICROBATCHES)
    plans = {
        schedule: partition(
            profile, num_stages=RANKS * chunks, num_ranks=RANKS, schedule=schedule, num_microbatches=MICROBATCHES
        )
        for schedule, chunks in CHUNKS.items()
    }
    rank = dist.get_rank()
    alone = Pipeline(program, Plan.from_cuts(program, [], schedule="gpipe", num_microbatches=MICROBATCHES))
    cases: dict[str, Any] = {}

    def step(pipeline: Pipeline) -> None:
        pipeline.step(batch, seed=0, step=1)
        program.zero_grad(set_to_none=True)

    for schedule, plan in plans.items():
        pipeline = Pipeline(program, plan)
        cases[schedule] = lambda p=pipeline: step(p)
        cases[f"{schedule} twin"] = twin(program, plan, batch, rank)
    cases["one process"] = (lambda: step(alone)) if rank == 0 else (lambda: None)
    times = in_turn(cases, rounds=rounds)
    rows = []
    for schedule, plan in plans.items():
        busy = RANKS * CHUNKS[schedule] * MICROBATCHES // RANKS
        bubble = (busy + RANKS - 1) / busy  # 9/8, interleaved 17/16
        stage_s = [stage.forward_s + stage.backward_s for stage in plan.stages]
        rows.append(
            {
                "schedule": schedule,
                "stage ms": 1e3 * statistics.median(stage_s),
                "step ms": 1e3 * statistics.median(times[schedule]),
                "twin ms": 1e3 * statistics.median(times[f"{schedule} twin"]),
                "of the twin ideal": bubble * median_ratio(times[f"{schedule} twin"], times[schedule]),
                "gain over one process": median_ratio(times["one process"], times[schedule]),
                "possible gain": RANKS / bubble,
            }
        )
    return rows


def main() -> None:
    given = options("efficiency", "a step against ranks that never wait")
    results: dict[str, Any] = {"machine": machine(), "microbatches": MICROBATCHES, "ranks": RANKS}
    rows = run_on_ranks(on_rank, RANKS, given.rounds, timeout_s=1800)[0]
    report(given, results, rows, "Pipeline efficiency, 2 ranks, 8 micro-batches")


if __name__ == "__main__":
    main()
