"""What the ranks of a pipeline say to each other before a step: the shapes of their inputs, or what is wrong with them.

One small collective, for which a wrong batch on one rank becomes the same error on all of them instead of a hang.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pipeline.boundary import Shape
from pipeline.plan_file import Plan
from pipeline.program import BlockProgram, nearest


def agreed_shapes(
    batch: Mapping[str, Tensor],
    *,
    program: BlockProgram,
    plan: Plan,
    rank: int,
    needed: Collection[str],
    num_microbatches: int | None,
    group: dist.ProcessGroup | None,
) -> dict[str, Shape]:
    """Shapes of all program inputs, the same on every rank.

    Args:
        batch: what this rank has; at least ``needed``, which its stages read.
        num_microbatches: that the batch must divide into (None: any number of samples will do).

    Raises:
        ValueError: on every rank, if a rank's batch is wrong or differs from another's.
    """
    error, shapes = "", {}
    try:
        shapes = _shapes_here(batch, program, plan.stages_of(rank), needed, num_microbatches)
    except ValueError as problem:
        error = str(problem)
    if plan.num_ranks > 1:
        gathered: list[Any] = [None] * plan.num_ranks
        dist.all_gather_object(gathered, (error, shapes), group=group)
        if not error:
            error = next((f"rank {i}: {e}" for i, (e, _) in enumerate(gathered) if e), "")
        shapes = {}
        for other, (_, theirs) in enumerate(gathered):
            for name, shape in theirs.items():
                known = shapes.setdefault(name, shape)
                if (known.size, known.dtype) != (shape.size, shape.dtype) and not error:
                    error = (
                        f"input {name!r} is {shape.size} {shape.dtype} on rank {other} of the pipeline, "
                        f"elsewhere {known.size} {known.dtype}"
                    )
                if shape.requires_grad and not known.requires_grad:
                    shapes[name] = shape
    if error:
        raise ValueError(error)
    return shapes


def _shapes_here(
    batch: Mapping[str, Tensor],
    program: BlockProgram,
    stages: Collection[int],
    needed: Collection[str],
    num_microbatches: int | None,
) -> dict[str, Shape]:
    for name in needed:
        if name not in batch:
            read = ", ".join(map(str, stages))
            raise ValueError(f"the batch lacks input {name!r}, which stage {read} reads{nearest(name, batch)}")
    num_samples = program.num_samples(batch)
    if num_microbatches is not None:
        if num_samples % num_microbatches:
            raise ValueError(
                f"a batch of {num_samples} samples does not divide into {num_microbatches} micro-batches; pad it with "
                "samples of weight 0 (pipeline.padding.pad_batch) or change num_microbatches"
            )
        program.microbatch({name: batch[name] for name in needed}, 0, num_microbatches)
    # A rank that does not read an input says nothing about its gradient.
    return {
        name: Shape(tuple(batch[name].shape), batch[name].dtype, batch[name].requires_grad and name in needed)
        for name in program.inputs
        if name in batch
    }
