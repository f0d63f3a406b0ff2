"""A forward pass over the stages, without gradients: evaluating a model that fits on no single device.

Plain sends and receives instead of the library's runtime: shapes may differ from batch to batch and from
micro-batch to micro-batch, and nothing is buffered for a backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline import wire

if TYPE_CHECKING:
    from pipeline.runtime import Pipeline


@torch.no_grad()
def run_forward(pipeline: Pipeline, batch: Mapping[str, Tensor], *, num_microbatches: int) -> dict[str, Tensor] | None:
    """The program's outputs for the whole batch, on the rank of the last stage; None on the others.

    Args:
        batch: at least ``pipeline.inputs_here``.
        num_microbatches: must divide the batch.
    """
    program, plan = pipeline.program, pipeline.plan
    bounds, count = plan.bounds(), num_microbatches
    outbox, results = wire.Outbox(), []
    inputs = {name: batch[name].detach() for name in pipeline.inputs_here}
    for i in range(count):
        rows = program.microbatch(inputs, i, count)
        for stage in pipeline.stages_here:
            first, last = bounds[stage]
            names = program.carry(first, recomputed=plan.recomputed)
            carry: list[Tensor] = []
            if stage:
                carry = wire.receive(
                    len(names),
                    source=(stage - 1) % plan.num_ranks,
                    group=pipeline.group,
                    device=pipeline.device,
                )
            env = {**rows, **dict(zip(names, carry, strict=True))}
            result = program.run(env, first, last, recomputed=plan.recomputed)
            if stage + 1 < plan.num_stages:
                names = program.carry(last, recomputed=plan.recomputed)
                outbox.send([result[n] for n in names], to=(stage + 1) % plan.num_ranks, group=pipeline.group)
            else:
                results.append(result)
    outbox.wait()
    if not results:
        return None
    return {name: torch.cat([part[name] for part in results]) for name in program.outputs}
