"""One block by itself: on inputs that are cut off from the rest, with fixed random draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipeline import keyed
from pipeline.program import SAMPLE_ID, Block


class _Pass(torch.autograd.Function):
    """Identity whose result is no view of the leaf, so that a block may work on it in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.data

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def call(block: Block, env: Mapping[str, Tensor], *, ids: Tensor | None) -> dict[str, Tensor]:
    """One forward of one block; gives what it writes. The same draws every time."""
    with keyed.scope(seed=0, step=0), keyed.block(block.name, ids=ids):
        given = {n: _Pass.apply(env[n]) if env[n].requires_grad else env[n] for n in block.reads}
        result = block.module(*[given[name] for name in block.reads])
    values = (result,) if isinstance(result, Tensor) else tuple(result)
    if len(values) != len(block.writes):
        raise ValueError(f"block {block.name!r} returned {len(values)} values; it must return {block.writes}")
    return dict(zip(block.writes, values, strict=True))


def cut_off(block: Block, env: Mapping[str, Tensor], grads: set[str]) -> dict[str, Tensor]:
    """Copies of the block's inputs; those named in ``grads`` are leaves that require gradients."""
    return {name: env[name].detach().clone().requires_grad_(name in grads) for name in block.reads}


def advance(block: Block, env: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors after the block, without gradients."""
    with torch.no_grad():
        written = call(block, {**env, **cut_off(block, env, set())}, ids=env.get(SAMPLE_ID))
    return {**env, **{name: tensor.detach() for name, tensor in written.items()}}


def generator_states(module: nn.Module, env: Mapping[str, Tensor]) -> list[Tensor]:
    """States of the global generators that a forward of the module can draw from: the CPU's and its CUDA devices'."""
    devices = {t.device for t in (*module.parameters(), *env.values()) if t.device.type == "cuda"}
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in sorted(devices, key=str))]


@contextmanager
def unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Buffers (the tensors and what they hold) and the generators' state are afterwards what they were before."""
    bound = [(part, dict(part._buffers)) for part in module.modules()]
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    devices = {t.device.index or 0 for t in module.parameters() if t.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield
        finally:
            for part, buffers in bound:
                part._buffers.clear()
                part._buffers.update(buffers)
            with torch.no_grad():
                for buffer, value in before:
                    buffer.copy_(value)
