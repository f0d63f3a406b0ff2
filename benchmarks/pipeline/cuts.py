"""The traced plan against equal block count and equal parameters, measured and simulated.

    python -m benchmarks.pipeline.cuts [--rounds N] [--out FILE]

On a model of unequal parts, with 2 and 4 ranks. With more ranks than cores the measured ratio says what this machine
does; the simulated one says what ranks with a core each would do.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from benchmarks.pipeline.measuring import busy_profile, in_turn, machine, measured_link, median_ratio, options, report
from benchmarks.pipeline.models import Sizes, unequal_batch, unequal_program
from pipeline import Pipeline, partition, simulate
from pipeline.baselines import equal_blocks, equal_parameters
from pipeline.heap import keep_freed_memory
from tests.distributed import run_on_ranks

SIZES = Sizes()
MICROBATCHES, SCHEDULE = 8, "1f1b"


def on_rank(num_ranks: int, rounds: int) -> list[dict[str, Any]]:
    keep_freed_memory()  # as training ranks do
    program, batch = unequal_program(SIZES), unequal_batch(SIZES, MICROBATCHES)
    profile, link = busy_profile(program, batch, num_microbatches=MICROBATCHES), measured_link()
    plans = {
        "traced": partition(
            profile,
            num_stages=num_ranks,
            schedule=SCHEDULE,
            num_microbatches=MICROBATCHES,
            link_latency_s=link.latency_s,
            link_bytes_per_s=link.bytes_per_s,
        ),
        "equal blocks": equal_blocks(profile, num_stages=num_ranks, schedule=SCHEDULE, link=link),
        "equal parameters": equal_parameters(profile, num_stages=num_ranks, schedule=SCHEDULE, link=link),
    }
    pipelines = {name: Pipeline(program, plan) for name, plan in plans.items()}

    def step(pipeline: Pipeline) -> None:
        pipeline.step(batch, seed=0, step=1)
        program.zero_grad(set_to_none=True)

    times = in_turn({name: partial(step, pipeline) for name, pipeline in pipelines.items()}, rounds=rounds)
    predicted = {name: simulate(profile, plan, link=link).step_s for name, plan in plans.items()}
    return [
        {
            "cut": name,
            "ranks": num_ranks,
            "blocks a stage": " ".join(str(len(stage.blocks)) for stage in plan.stages),
            "measured ms": 1e3 * statistics.median(times[name]),
            "simulated ms": 1e3 * predicted[name],
            "measured ratio": median_ratio(times[name], times["traced"]),
            "simulated ratio": predicted[name] / predicted["traced"],
        }
        for name, plan in plans.items()
    ]


def main() -> None:
    given = options("cuts", "the traced plan against cuts by hand")
    results: dict[str, Any] = {"machine": machine(), "schedule": SCHEDULE, "microbatches": MICROBATCHES}
    rows = [row for ranks in (2, 4) for row in run_on_ranks(on_rank, ranks, ranks, given.rounds, timeout_s=1800)[0]]
    report(given, results, rows, "Cuts of a model with unequal parts")


if __name__ == "__main__":
    main()
