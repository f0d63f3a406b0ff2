"""How much a decoder attends to each document, for the objective ``adist``: two readings of one cross-attention.

They are computed beside the fused kernel, which shows neither logits nor weights, without graph and for the
answer positions that count only: (1 or T) x k*L products a head.

Shapes: B samples, k documents each, L context tokens of a pair, J = k*L, H heads, W head width, T answer tokens asked.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


@torch.no_grad()
def document_attention(
    query_BHTW: Tensor,
    key_BHJW: Tensor,
    value_BHJW: Tensor,
    mask_BJ: Tensor,
    *,
    k: int,
    kind: Literal["logits", "values"],
) -> Tensor:
    """One layer's attention to each document (B, k, T), a mean over heads.

    ``logits``: the mean over a document's tokens of ``query.key / sqrt(W)``, before the softmax (FiD-KD, 2012.04584).
    ``values``: the sum over a document's tokens of their weight after the softmax times the length of their value
    (Atlas, 2208.03299). Tokens of a document are all of its pair's context, the question's repetition included; masked
    ones count for nothing.
    """
    logit_BHTJ = query_BHTW @ key_BHJW.transpose(2, 3) * query_BHTW.shape[-1] ** -0.5
    mask_BkL = mask_BJ.unflatten(1, (k, -1))
    if kind == "logits":
        logit_BTkL = logit_BHTJ.mean(1).unflatten(2, (k, -1))
        total_BTk = (logit_BTkL * mask_BkL.unsqueeze(1)).sum(3)
        return (total_BTk / mask_BkL.sum(2).clamp(min=1).unsqueeze(1)).transpose(1, 2)
    weight_BHTJ = logit_BHTJ.masked_fill(~mask_BJ[:, None, None], -torch.inf).softmax(3)
    weighed_BTJ = (weight_BHTJ * value_BHJW.norm(dim=3).unsqueeze(2)).mean(1)
    return weighed_BTJ.unflatten(2, (k, -1)).sum(3).transpose(1, 2)
