"""May a stage's backward be split into input and weight gradients? Tried out, before a zero-bubble schedule runs.

The library's split looks for a stage's parameters on the way from what the stage sends back to what it
received. Parameters that are not on that way (the stage sends on what depends on nothing received) and batch
inputs that need gradients get none, without a word; shared weights and inputs that meet in several places
make it fail in the middle of a step. No rule that is simple is also right, so each stage is run once on
arbitrary input, both ways, and the gradients are compared. It costs two forwards and backwards a signature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from pipeline.boundary import Shape
from pipeline.stage import StageModule


def why_not_split(
    module: StageModule, received: Sequence[Shape], rows: Mapping[str, Tensor], *, device: torch.device
) -> str:
    """Why the backward of a stage cannot be split, or an empty string. Gradients are left as they were.

    Args:
        received: shapes of what the stage receives for a micro-batch; empty for stage 0, whose backward the library
            never splits.
        rows: batch inputs of one micro-batch.
    """
    if not received:
        return ""
    generator = torch.Generator().manual_seed(0)
    values = [_value(shape, generator).to(device) for shape in received]
    leaves = {name: tensor for name, tensor in rows.items() if tensor.requires_grad}
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    before = {name: p.grad for name, p in parameters.items()}
    module.rows = [dict(rows)]
    try:
        outputs, inputs = _forward(module, values)
        weights = [torch.rand_like(output) + 0.5 for output in outputs]
        wanted = [*parameters.values(), *(t for t in inputs if t.requires_grad), *leaves.values()]
        right = torch.autograd.grad(outputs, wanted, weights, allow_unused=True)
        for name, grad in zip(leaves, right[len(wanted) - len(leaves) :], strict=True):
            if grad is not None:
                return f"the gradient of batch input {name!r} would be lost"
        outputs, inputs = _forward(module, values)
        for parameter in parameters.values():
            parameter.grad = None
        try:
            _, groups = stage_backward_input(outputs, weights, inputs, iter(parameters.values()))
            stage_backward_weight(iter(parameters.values()), groups)
        except RuntimeError as error:
            return f"the library cannot take its graph apart ({str(error).splitlines()[0]})"
        for (name, parameter), grad in zip(parameters.items(), right, strict=False):
            found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            expected = torch.zeros_like(parameter) if grad is None else grad
            if not torch.allclose(found, expected, rtol=1e-3, atol=1e-6 * float(expected.abs().max())):
                return f"the gradient of parameter {name.removeprefix('blocks.')!r} of the stage would be wrong"
        return ""
    finally:
        module.rows, module.outputs = [], []
        for name, parameter in parameters.items():
            parameter.grad = before[name]


def _value(shape: Shape, generator: torch.Generator) -> Tensor:
    if shape.dtype.is_floating_point:
        return torch.randn(shape.size, generator=generator, dtype=torch.float64).to(shape.dtype)
    return torch.ones(shape.size, dtype=shape.dtype)


def _forward(module: StageModule, values: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    inputs = [value.clone().requires_grad_(value.is_floating_point()) for value in values]
    outputs = [tensor for tensor in module(*inputs, microbatch=0) if tensor.requires_grad]
    return outputs, inputs
