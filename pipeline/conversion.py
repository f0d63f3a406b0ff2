"""Replace batch norm by something that looks at one sample only.

A batch norm in training mode mixes the rows of a batch, so micro-batches change its function. None of the ways
out is free:

- `batch_norm_to_group_norm`: normalises groups of channels within each sample. Affine weights are kept,
  running statistics are dropped; the function changes, also in evaluation, and has to be trained again.
- `batch_norm_to_layer_norm`: the same with one group, over all channels (and positions) of a sample.
- `freeze_batch_norm`: uses the running statistics in training too. In evaluation the function is what it
  was; statistics are no longer learned. The usual choice for public weights that are fine-tuned.
- `synchronise_batch_norm`: the statistics of the whole batch, over the ranks that share it. The function stays what it
  is on one device, but a step then has one micro-batch, because the first of several is normalised before the
  others exist; with more it is refused.

Only torch's own batch norm layers are converted. A subclass may do more in its forward (timm's BatchNormAct2d also
activates), which would be lost, so it is refused by its path.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from pipeline.replacement import rebind_blocks
from pipeline.synchronised_norm import SynchronisedBatchNorm

Report = Callable[[str, str], None]
_KNOWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class FrozenBatchNorm(nn.Module):
    """Batch norm with fixed statistics, in training mode too; (N, C, ...) like the original.

    Keeps the original's parameters (which go on training, if they did) and buffers under their names.
    """

    def __init__(self, original: _BatchNorm) -> None:
        super().__init__()
        self.num_features, self.eps = original.num_features, original.eps
        self.weight, self.bias = original.weight, original.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(original, name))

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.get_buffer("running_mean"), self.get_buffer("running_var")
        return functional.batch_norm(x, mean, variance, self.weight, self.bias, training=False, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}"


def batch_norm_to_group_norm(module: nn.Module, *, num_groups: int = 32, report: Report | None = None) -> nn.Module:
    """Replace every batch norm of a module tree by a group norm, in place (Wu and He, Group Normalization, 2018).

    Args:
        num_groups: wanted; a layer with C channels gets the greatest common divisor of it and C, which
            ``report`` is told. After a flat layer (BatchNorm1d, which may see (N, C)) a group has at least
            two channels, because one number has no spread.
        report: called with (path, what was done) for every replacement.

    Returns:
        The module; another one only if ``module`` is itself a batch norm.

    Raises:
        ValueError: for ``num_groups`` below 1, and naming the path of a layer that cannot be converted (a subclass
            of torch's layers, a lazy layer, a flat one of one channel).
    """
    if num_groups < 1:
        raise ValueError(f"num_groups is {num_groups}; it must be at least 1")

    def convert(path: str, norm: _BatchNorm) -> nn.Module:
        channels = norm.num_features
        groups = math.gcd(num_groups, channels)
        if isinstance(norm, nn.BatchNorm1d) and groups == channels:
            groups = max((g for g in range(1, channels) if channels % g == 0), default=0)
        if not groups:
            raise ValueError(f"{path or 'the module'}: a BatchNorm1d of one channel has nothing else to normalise over")
        new = nn.GroupNorm(groups, channels, eps=norm.eps, affine=norm.affine)
        if norm.affine:
            new.weight, new.bias = norm.weight, norm.bias
        return new

    return _replace(module, convert, report)


def batch_norm_to_layer_norm(module: nn.Module, *, report: Report | None = None) -> nn.Module:
    """`batch_norm_to_group_norm` with one group: all channels and positions of a sample together."""
    return batch_norm_to_group_norm(module, num_groups=1, report=report)


def freeze_batch_norm(module: nn.Module, *, report: Report | None = None) -> nn.Module:
    """Replace every batch norm of a module tree by one with fixed statistics, in place.

    Unlike ``eval()`` this survives the next ``train()``.

    Returns:
        The module; another one only if ``module`` is itself a batch norm.

    Raises:
        ValueError: naming the path of a layer without running statistics, a lazy one, or a subclass of torch's layers.
    """

    def convert(path: str, norm: _BatchNorm) -> nn.Module:
        if norm.running_mean is None:
            raise ValueError(
                f"{path or 'the module'}: {type(norm).__name__} has no running statistics to freeze "
                "(track_running_stats=False); convert it to group norm"
            )
        return FrozenBatchNorm(norm)

    return _replace(module, convert, report)


def synchronise_batch_norm(
    module: nn.Module,
    *,
    num_microbatches: int,
    group: dist.ProcessGroup | None = None,
    report: Report | None = None,
) -> nn.Module:
    """Replace every batch norm of a module tree by one with the statistics of the whole batch, in place.

    Args:
        num_microbatches: of the steps that the module is for; only 1 is exact.
        group: the ranks that hold parts of one batch, such as the replicas of a stage (None: all).

    Returns:
        The module; another one only if ``module`` is itself a batch norm.

    Raises:
        ValueError: for several micro-batches, and naming the path of a lazy layer or a subclass of torch's layers.
    """
    if num_microbatches != 1:
        raise ValueError(
            f"num_microbatches is {num_microbatches}; a synchronised batch norm needs 1: the first of several "
            "micro-batches is normalised before the others exist, so its statistics cannot be those of the batch. Use "
            "one micro-batch (more replicas instead of stages), freeze_batch_norm or batch_norm_to_group_norm"
        )
    return _replace(module, lambda path, norm: SynchronisedBatchNorm(norm, group), report)


def _replace(module: nn.Module, convert: Callable[[str, _BatchNorm], nn.Module], report: Report | None) -> nn.Module:
    found = {path: part for path, part in module.named_modules(remove_duplicate=False) if isinstance(part, _BatchNorm)}
    for path, part in found.items():
        if isinstance(part, LazyModuleMixin):
            raise ValueError(f"{path}: {type(part).__name__} has no channels yet; run the model once before converting")
        if type(part) not in _KNOWN:
            raise ValueError(
                f"{path or 'the module'}: {type(part).__module__}.{type(part).__qualname__} is a batch norm of its own "
                f"kind and may do more than normalise; write it as one of {', '.join(k.__name__ for k in _KNOWN)} "
                "followed by whatever else it does, then convert"
            )
    new: dict[int, nn.Module] = {}
    for path, part in found.items():  # all first, so that nothing is changed if one is refused
        if id(part) not in new:
            new[id(part)] = convert(path, part).train(part.training)
    for path, part in found.items():
        if report is not None:
            report(path, f"{type(part).__name__} -> {new[id(part)]}")
        if path:
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, new[id(part)])
    rebind_blocks(module)
    return new.get(id(module), module)
