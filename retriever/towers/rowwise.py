"""Public models made functions of the row alone: no draws, no batch statistics.

A tower runs twice a step and its rows are dealt out or piped, so a mask drawn by a generator would differ between the
two runs, and a batch norm would see another batch on every layout. Dropout and stochastic depth are therefore off (what
is lost is a little regularisation when a public model is tuned), and batch norms are folded into a scale and a shift of
their running statistics: the function that the model has in evaluation, whose scale and shift go on training.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

_CHANCES = {
    "Dropout": "p", "Dropout1d": "p", "Dropout2d": "p", "Dropout3d": "p", "AlphaDropout": "p",
    "FeatureAlphaDropout": "p", "StochasticDepth": "p", "DropPath": "drop_prob", "PatchDropout": "prob",
}  # fmt: skip
_PLAIN_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class FoldedNorm(nn.Module):
    """A batch norm with its running statistics: ``x * scale + shift`` by channel (dimension 1), then what came after.

    Args:
        after: activations that the norm itself did (timm's BatchNormAct2d).
    """

    def __init__(self, norm: _BatchNorm, after: nn.Module | None) -> None:
        super().__init__()
        assert norm.running_mean is not None and norm.running_var is not None
        scale = (norm.running_var + norm.eps).rsqrt()
        if norm.weight is not None:
            scale = scale * norm.weight.detach()
        shift = -norm.running_mean * scale
        if norm.bias is not None:
            shift = shift + norm.bias.detach()
        self.scale, self.shift, self.after = nn.Parameter(scale), nn.Parameter(shift), after

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, *[1] * (x.dim() - 2))
        x = torch.addcmul(self.shift.view(shape), x, self.scale.view(shape))
        return x if self.after is None else self.after(x)


def rowwise(model: nn.Module, *, what: str) -> nn.Module:
    """Turn off what draws and fold batch norms, in place, once the model has its weights.

    Args:
        what: names the model in messages.

    Raises:
        ValueError: for a batch norm that cannot be folded.
    """
    for path, module in list(model.named_modules()):
        name = type(module).__name__
        if name in _CHANCES and hasattr(module, _CHANCES[name]):
            setattr(module, _CHANCES[name], 0.0)
        if isinstance(module, _BatchNorm):
            parent, _, last = path.rpartition(".")
            setattr(model.get_submodule(parent), last, _folded(module, f"{what}: {path}"))
    return model


def _folded(norm: Any, where: str) -> FoldedNorm:
    if norm.running_mean is None:
        raise ValueError(f"{where} has no running statistics, so it mixes the rows of a batch; use another model")
    if type(norm) in _PLAIN_NORMS:
        return FoldedNorm(norm, None)
    if type(norm).__name__ == "BatchNormAct2d":
        return FoldedNorm(norm, nn.Sequential(norm.drop, norm.act))
    raise ValueError(f"{where} is a {type(norm).__name__}, a batch norm of its own kind; use another model")
