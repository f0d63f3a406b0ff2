"""Pictures in [0, 1] as a public model wants them: at its side, less its mean, over its deviation.

How a picture comes to a square is ``data.image_transform``, which has the libraries' own transforms.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Pixels(nn.Module):
    """(N, 3, S, S) in [0, 1] to (N, 3, side, side), normalised.

    Args:
        side: 0: S.
    """

    def __init__(self, mean: tuple[float, ...], deviation: tuple[float, ...], *, side: int) -> None:
        super().__init__()
        self.mean, self.deviation, self.side = tuple(mean), tuple(deviation), side

    def forward(self, image_N3SS: Tensor) -> Tensor:
        if self.side and image_N3SS.shape[-1] != self.side:
            image_N3SS = F.interpolate(
                image_N3SS, size=(self.side, self.side), mode="bilinear", antialias=True, align_corners=False
            )
        mean, deviation = (image_N3SS.new_tensor(value).view(1, 3, 1, 1) for value in (self.mean, self.deviation))
        return (image_N3SS - mean) / deviation

    def describe(self) -> dict[str, object]:
        return {"side": self.side, "mean": self.mean, "deviation": self.deviation}
