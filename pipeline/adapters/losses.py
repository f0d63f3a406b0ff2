"""Losses that sum over samples: weights come divided by a denominator of the global batch.

B samples, L positions, V vocabulary, E features. No loss here takes a mean: a mean over a micro-batch is
another number for every way of splitting the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.adapters.assembly import Loss


class TokenLoss(nn.Module):
    """Weighted cross-entropy of tokens, summed over the positions of each sample."""

    def forward(self, logits_BLV: Tensor, target_BL: Tensor, weight_BL: Tensor) -> Tensor:
        """Losses (B, 1). ``target_BL[b, t]`` is the token that ``logits_BLV[b, t]`` should predict."""
        each_BL = F.cross_entropy(logits_BLV.flatten(0, 1), target_BL.flatten(), reduction="none")
        return (each_BL.view(target_BL.shape) * weight_BL).sum(1, keepdim=True)


class SquaredError(nn.Module):
    """Weighted squared distance of features (B, E), or (B, L, E), to targets of that shape."""

    def forward(self, features: Tensor, target: Tensor, weight_B: Tensor) -> Tensor:
        """Losses (B, 1)."""
        return (features - target).square().flatten(1).sum(1, keepdim=True) * weight_B[:, None]


def token_loss() -> Loss:
    """Loss of language models; further batch inputs: ``target`` and ``target_weight``, both (B, L)."""
    return Loss(TokenLoss(), ("logits", "target", "target_weight"))


def squared_error(output: str) -> Loss:
    """Loss on one output of an encoder; further batch inputs: ``target`` (its shape) and ``sample_weight`` (B,)."""
    return Loss(SquaredError(), (output, "target", "sample_weight"))


def next_token_targets(
    input_ids: Tensor, *, attention_mask: Tensor | None = None, denominator: float | None = None
) -> tuple[Tensor, Tensor]:
    """Targets of a causal model: position t predicts token t + 1.

    Args:
        input_ids: (B, L).
        attention_mask: (B, L), not zero where there is a token; a position counts if it and its successor
            are tokens.
        denominator: number of counted positions in the *global* batch; None: those given here.

    Returns:
        ``target`` (B, L) int64 and ``target_weight`` (B, L) float32. With one denominator the loss of the
        whole batch is the mean over counted positions, as the losses of transformers are.

    Raises:
        ValueError: if no position counts.
    """
    target = input_ids.roll(-1, 1)
    counts = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool().clone()
    counts[:, :-1] &= counts[:, 1:].clone()
    counts[:, -1] = False
    total = float(counts.sum()) if denominator is None else float(denominator)
    if total <= 0:
        raise ValueError(f"denominator is {total:g}; at least one counted position is needed")
    return target, counts.to(torch.float32) / total
