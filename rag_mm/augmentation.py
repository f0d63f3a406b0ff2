"""Pictures changed a little in colour and shape, so that the retriever learns what stays the same.

Two drawings of one flag differ in hue, brightness, proportions and cropping; so do these changes. The draw
of a picture is a function of (seed, step, id), so every rank, phase and reader of it sees the same one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.keyed import seed_of

NUM_DRAWS = 20
COLOUR, BRIGHTNESS, GAMMA, STRETCH, SHEAR, SHIFT = 0.12, 0.06, 0.15, 0.08, 0.04, 0.06


def augment(image_N3SS: Tensor, ids: Sequence[str], *, seed: int, step: int, strength: float = 1.0) -> Tensor:
    """Changed pictures (N, 3, S, S) in [0, 1]; ``strength`` 0 gives them back as they are."""
    if strength == 0 or not len(ids):
        return image_N3SS
    draws = numpy.stack([_draws(seed_of("augment", seed, step, name)) for name in ids])
    z = torch.from_numpy(draws).to(image_N3SS.dtype) * strength
    colour = torch.eye(3) + COLOUR * z[:, :9].view(-1, 3, 3)
    x = torch.einsum("nij,njhw->nihw", colour, image_N3SS - 0.5) + 0.5 + BRIGHTNESS * z[:, 9:12].view(-1, 3, 1, 1)
    x = x.clamp(1e-3, 1.0) ** (GAMMA * z[:, 12]).exp().view(-1, 1, 1, 1)
    stretch, shear, shift = 1 + STRETCH * z[:, 13:15], SHEAR * z[:, 15:17], SHIFT * z[:, 17:19]
    rows = [stretch[:, 0], shear[:, 0], shift[:, 0], shear[:, 1], stretch[:, 1], shift[:, 1]]
    grid = F.affine_grid(torch.stack(rows, dim=1).view(-1, 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


def _draws(key: int) -> numpy.ndarray:
    return numpy.random.Generator(numpy.random.Philox(key=key)).standard_normal(NUM_DRAWS)
