"""How close a step comes to two ranks that compute without ever waiting or sending.

    python -m benchmarks.pipeline.efficiency [--rounds N] [--out FILE]

The ideal is the *twin*: both ranks run their own stages' forward and backward of all micro-batches at the same
time, without communication; times 9/8 (interleaved 17/16), the bubble that 8 micro-batches on 2 ranks
cannot avoid. The ratio to one process is given too, against 16/9 (32/17), what two ranks with a core each could gain.
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
from pipeline.program import Block
from tests.distributed import run_on_ranks

RANKS, MICROBATCHES, SAMPLES, LAYERS, WIDTH, LENGTH = 2, 8, 32, 8, 256, 96
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2}


def twin(program: BlockProgram, plan: Plan, batch: dict[str, Tensor], rank: int) -> Any:
    """Forward and backward of this rank's stages on inputs that are there already."""
    rows = [program.microbatch(batch, i, MICROBATCHES) for i in range(MICROBATCHES)]
    stages: list[tuple[tuple[Block, ...], int, int, list[dict[str, Tensor]]]] = []
    with torch.no_grad():
        for stage in plan.stages_of(rank):
            first, last = plan.bounds()[stage]
            carries = [program.run(row, 0, first) if first else {} for row in rows]
            stages.append((program.blocks[first:last], first, last, carries))

    def run() -> None:
        for i, row in enumerate(rows):
            for _, first, last, carries in stages:
                leaves = {name: t.detach().requires_grad_() for name, t in carries[i].items()}
                result = program.run({**row, **leaves}, first, last)
                torch.autograd.backward(list(result.values()), [torch.ones_like(t) for t in result.values()])
        program.zero_grad(set_to_none=True)

    return run


def on_rank(rounds: int) -> list[dict[str, Any]]:
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
