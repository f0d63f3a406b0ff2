"""Rotary tables as a block: computed once, read by every layer.

B samples, L positions, H head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# These recompute their frequencies from the largest position of the batch and keep them in buffers.
DATA_DEPENDENT = ("dynamic", "longrope")


class RotaryTable(nn.Module):
    """Cosines and sines of positions, by the model's own rotary module.

    Positions are 0 .. L-1 for every sample, and the tables (1, L, H) have no sample axis; or they come
    from the batch (left padding, cached tokens), and the tables are (B, L, H).

    Raises:
        ValueError: for frequencies that depend on the data.
    """

    def __init__(self, rotary: Any, like: nn.Module) -> None:
        super().__init__()
        if rotary.rope_type in DATA_DEPENDENT:
            raise ValueError(
                f"rope type {rotary.rope_type!r} changes its frequencies with the longest position of a batch, so "
                "samples and micro-batches would depend on each other; use a fixed one ('default', 'linear', "
                "'llama3', 'yarn')"
            )
        self.rotary = rotary
        # In a tuple, so that it is not registered: only the floating-point type of its weights is asked for.
        self._like = (like,)

    def forward(self, ids_BL: Tensor, positions_BL: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if positions_BL is None:
            positions_BL = torch.arange(ids_BL.shape[1], device=ids_BL.device)[None]
        kind = next(self._like[0].parameters()).dtype
        return self.rotary(torch.empty(0, dtype=kind, device=ids_BL.device), position_ids=positions_BL)
