"""Batch norm whose statistics are those of the whole batch, spread over ranks.

Exact where every rank of a group runs its rows of the batch in one piece: data replicas with one micro-batch each, or
a hoisted block. Within a pipeline's micro-batches it cannot be: the first micro-batch is normalised before the others
exist, so `pipeline.lineage.require_sample_lineage` lets a program with it pass only with ``num_microbatches=1``.

``torch.nn.SyncBatchNorm`` does the same on GPUs only. The price: two small all-reduces a layer and forward (sums, then
squares about the mean, which loses no digits), one for each in the backward, and ranks that wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

_where: ContextVar[Literal["group", "rank", "running"]] = ContextVar("norm_statistics", default="group")


@contextmanager
def norm_statistics(where: Literal["rank", "running"]) -> Iterator[None]:
    """Within it, nothing is sent: statistics are those of the rows here, or the running ones (for a trace)."""
    token = _where.set(where)
    try:
        yield
    finally:
        _where.reset(token)


class _Sum(torch.autograd.Function):
    """Sum over a group; the gradient of the ranks' summed losses is summed over it too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = x.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class SynchronisedBatchNorm(nn.Module):
    """(N, C, ...) like the original, whose parameters and buffers it keeps under their names.

    Running statistics move in forwards with graph only (and in traces, which put them back), so a hoisted block, which
    runs twice, moves them once.

    Args:
        group: ranks that run parts of one batch (None: all; a single process needs none). All of them must call it, in
            the same order.

    Raises:
        ValueError: (in a forward) where statistics would be of a single value, as torch's layers do.
    """

    def __init__(self, original: _BatchNorm, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum = original.num_features, original.eps, original.momentum
        self.weight, self.bias, self.group = original.weight, original.bias, group
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(original, name))

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self._buffers["running_mean"], self._buffers["running_var"]
        if _where.get() == "running" and (mean is None or variance is None):
            mean, variance = x.new_zeros(self.num_features), x.new_ones(self.num_features)
        if mean is not None and (not self.training or _where.get() == "running"):
            return functional.batch_norm(x, mean, variance, self.weight, self.bias, training=False, eps=self.eps)
        axes = [axis for axis in range(x.dim()) if axis != 1]
        shape = [-1 if axis == 1 else 1 for axis in range(x.dim())]
        rows = x.new_full((1,), x.numel() / self.num_features)
        *sums, count = self._total(torch.cat([x.sum(axes), rows])).split([self.num_features, 1])
        if _where.get() == "group" and count <= 1:  # on every rank; the tracked variance would be 0 / 0
            raise ValueError("a batch norm needs more than one value a channel in training; this batch gives one")
        mean = sums[0] / count
        centred = x - mean.view(shape)
        variance = self._total(centred.square().sum(axes)) / count
        if self.training and (torch.is_grad_enabled() or _where.get() == "rank"):
            self._track(mean, variance * count / (count - 1))
        scale = (variance + self.eps).rsqrt() * (1.0 if self.weight is None else self.weight)
        y = centred * scale.view(shape)
        return y if self.bias is None else y + self.bias.view(shape)

    def _total(self, x: Tensor) -> Tensor:
        alone = _where.get() != "group" or not dist.is_initialized() or dist.get_world_size(self.group) == 1
        return x if alone else _Sum.apply(x, self.group)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        old_mean, old_variance, count = (
            self._buffers[name] for name in ("running_mean", "running_var", "num_batches_tracked")
        )
        if old_mean is None or old_variance is None or count is None:
            return
        count += 1
        share = count.to(mean.dtype).reciprocal() if self.momentum is None else mean.new_tensor(self.momentum)
        old_mean.lerp_(mean, share)
        old_variance.lerp_(variance, share)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}"
