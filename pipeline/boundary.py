"""What crosses from one stage to the next, made safe for the library that sends it.

``torch.distributed.pipelining`` receives activations and gradients into buffers of a fixed shape and
contiguous strides, and a received activation is an autograd leaf. Hence: static shapes found without
communication (`carry_shapes`), and an identity at both ends of a cut that makes the tensor and its
gradient contiguous and is not a view of the leaf, so that the next block may work in place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from pipeline import keyed
from pipeline.program import BlockProgram
from pipeline.synchronised_norm import norm_statistics


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.data.contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()


def boundary(x: Tensor) -> Tensor:
    """Identity; the value and its gradient are contiguous, and the result is no view of a leaf."""
    return _Boundary.apply(x) if x.requires_grad else x.contiguous()


@dataclass(frozen=True)
class Shape:
    """Static description of a tensor."""

    size: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Shape:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device | str) -> Tensor:
        return torch.empty(self.size, dtype=self.dtype, device=device, requires_grad=self.requires_grad)


class _Cuts(nn.Module):
    def __init__(self, program: BlockProgram, bounds: Sequence[tuple[int, int]], recomputed: Collection[str]) -> None:
        super().__init__()
        self.program, self.bounds, self.recomputed = program, bounds, recomputed

    def forward(self, batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        carries: list[dict[str, Tensor]] = []
        for first, last in self.bounds:
            inputs = {n: batch[n] for n in self.program.inputs_of(first, last, recomputed=self.recomputed)}
            env = {**inputs, **(carries[-1] if carries else {})}
            carries.append(self.program.run(env, first, last, recomputed=self.recomputed))
        return carries


def carry_shapes(
    program: BlockProgram,
    bounds: Sequence[tuple[int, int]],
    microbatch: Mapping[str, Shape],
    *,
    device: torch.device,
    recomputed: Collection[str] = (),
) -> list[dict[str, Shape]]:
    """Shapes of the carry after each stage for one micro-batch, without computing or communicating.

    Runs the whole program on fake tensors, so it works where the modules of other stages were freed.

    Raises:
        ValueError: where a shape (or a branch) depends on data, which no static buffer can receive.
    """
    probe = _Cuts(program, bounds, recomputed)
    # Fake twins: one for each tensor, so that ties stay ties, and one name for each place that holds it:
    # swapping a module under two of its names would restore the twin instead of the original.
    real = [
        (f"{path}.{name}", tensor)
        for path, module in probe.named_modules()
        for store in (module._parameters, module._buffers)
        for name, tensor in store.items()
        if tensor is not None
    ]
    with FakeTensorMode(allow_non_fake_inputs=True), keyed.scope(seed=0, step=0), norm_statistics("rank"):
        twins = {id(t): Shape.of(t).empty(device) for _, t in real}
        state = {name: twins[id(t)] for name, t in real}
        batch = {name: shape.empty(device) for name, shape in microbatch.items()}
        try:
            carries = torch.func.functional_call(probe, state, (batch,), tie_weights=False)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ValueError(
                f"the program's shapes or branches depend on data ({error}); tensors between stages need "
                "static shapes: pad, or keep the blocks in one stage"
            ) from error
        return [{name: Shape.of(t) for name, t in carry.items()} for carry in carries]
