"""Pictures by two small convolutions and a linear map, from scratch: enough for flags and emoji of 24 pixels.

The grid is kept (no pooling over places): where a stripe lies is what tells one flag from another. Raw pixels plus a
learned map of them start far better but end no better (docs/log.md).

Shapes: N rows, S side of a picture, E_i width.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from retriever.config import RetrieverConfig
from retriever.towers.interface import ImageBackend, Tower


class PatchConvolution(nn.Conv2d):
    """A picture in [0, 1] to activated patches."""

    def forward(self, image_N3SS: Tensor) -> Tensor:
        return F.gelu(super().forward(image_N3SS - 0.5))


class MixConvolution(nn.Conv2d):
    """Patches to patches that have seen their neighbours, activated."""

    def forward(self, grid: Tensor) -> Tensor:
        return F.gelu(super().forward(grid))


class GridLinear(nn.Linear):
    """A whole grid of patches to one vector of unit length."""

    def forward(self, grid: Tensor) -> Tensor:
        return F.normalize(super().forward(grid.flatten(1)), dim=1)


class ImageTower(Tower):
    """Two convolutions over patches and a linear map of the whole grid, of unit length.

    Each layer does all that happens until the next one begins, so a tower can be cut between any two.
    """

    inputs = ("image",)

    def __init__(self, config: RetrieverConfig, *, image_size: int) -> None:
        super().__init__()
        patch, self.dim = config.image_patch, config.image_dim
        if image_size % patch:
            raise ValueError(f"retriever.image_patch is {patch}; it must divide data.image_size ({image_size})")
        grid = (image_size // patch) ** 2
        self.patch = PatchConvolution(3, config.image_width, patch, stride=patch)
        self.mix = MixConvolution(config.image_width, config.image_width, 3, padding=1)
        self.out = GridLinear(config.image_width * grid, config.image_dim)

    def forward(self, image_N3SS: Tensor) -> Tensor:
        return self.out(self.mix(self.patch(image_N3SS)))


class SmallImage(ImageBackend):
    """``retriever.image: small``."""

    def tower(self, *, weights: bool = True) -> ImageTower:
        return ImageTower(self.config, image_size=self.image_size)

    def describe(self) -> dict[str, Any]:
        config = self.config
        return {
            "kind": "small", "dim": config.image_dim, "width": config.image_width, "patch": config.image_patch,
        }  # fmt: skip
