"""Batches that do not divide: filled up with samples of weight 0, which change nothing but the shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pipeline.program import BlockProgram, nearest


def pad_batch(
    program: BlockProgram, batch: Mapping[str, Tensor], *, multiple: int, weights: Sequence[str]
) -> dict[str, Tensor]:
    """The batch with repetitions of its last sample, so that ``multiple`` divides it.

    The denominators of the loss are counted before, on the real samples: weights of added ones are 0.

    Args:
        batch: inputs of the program; those that need gradients get none from added rows but the 0 of their weight.
        multiple: what the number of samples must be divisible by, such as micro-batches times replicas.
        weights: inputs (sample or pair axis) that are set to 0 for added samples.

    Raises:
        ValueError: for a weight that is no input of the program, or has no sample axis.
    """
    if multiple < 1:
        raise ValueError(f"multiple is {multiple}; it must be at least 1")
    for name in weights:
        if name not in program.inputs or name not in batch:
            raise ValueError(f"weights names {name!r}, which is no input{nearest(name, program.inputs)}")
        if not program.has_samples(name):
            raise ValueError(f"weights names {name!r}, which has no sample axis, so it cannot be 0 for some samples")
    num_samples = program.num_samples(batch)
    added = -num_samples % multiple
    padded = dict(batch)
    if not added:
        return padded
    for name, tensor in batch.items():
        if name not in program.inputs or not program.has_samples(name):
            continue
        of_one = tensor[-(tensor.shape[0] // num_samples) :]
        more = of_one.detach().repeat(added, *[1] * (tensor.dim() - 1))
        padded[name] = torch.cat([tensor, torch.zeros_like(more) if name in weights else more])
    return padded
