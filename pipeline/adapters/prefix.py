"""Vectors in front of tokens: how features of a picture, or of anything else, enter a decoder.

The decoder never learns where they come from: an encoder's features are brought to its width and stand in the row as
embedded tokens do. The encoder may be a block of the program (`Prefix.module`) or run outside of it, its features being
batch inputs.

Shapes: N vectors of C features, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Prefix:
    """Vectors in front of tokens: ``module(*reads)`` gives (rows, N, D), one row a document (or question).

    Attributes:
        module: such as `Projection` or an encoder with one behind it.
        reads: batch inputs, one row a document (axis ``pair``), or a question (``sample``).
        mask: batch input (rows, N), 0 where there is no vector, such as all of a document without a picture.
    """

    module: nn.Module
    reads: tuple[str, ...]
    mask: str


class Projection(nn.Module):
    """Features to the width of a decoder by two layers, as in LLaVA 1.5 (2310.03744)."""

    def __init__(self, num_features: int, width: int) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(num_features, width), nn.Linear(width, width), nn.GELU()

    def forward(self, features_RNC: Tensor) -> Tensor:
        """(rows, N, D)."""
        return self.second(self.act(self.first(features_RNC)))
