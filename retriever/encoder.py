"""The dual encoder: one embedding for questions and documents made of text, a picture, or both.

An embedding is two blocks side by side, text and picture, so the inner product of two of them is
``text.text + picture.picture`` and a missing part contributes exactly nothing. The towers are shared between
questions and documents. They are deliberately small:

- text: a gated bag of hashed trigrams. Gates start at the trigrams' idf, vectors at random near-orthogonal
  directions, so that an untrained tower already is a lexical matcher. The length of the bag is kept up to
  1: a question whose every word is a stop word ("the capital of this country") has almost no text.
- picture: two small convolutions and a linear map, from scratch. (Raw pixels plus a learned map of them start
  far better but end no better; docs/log.md.)

Shapes: N rows, L trigrams, E_t + E_i = E embedding width, S side of a picture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retriever.config import RetrieverConfig
from retriever.trigrams import hashed, idf_weights

Features = Mapping[str, Tensor]


class TextTower(nn.Module):
    """Gated bag of hashed trigrams: ``sum_i gate_i * vector_i``, shortened to a length below 1."""

    def __init__(self, config: RetrieverConfig) -> None:
        super().__init__()
        buckets, dim = config.text_buckets, config.text_dim
        self.gate = nn.Parameter(torch.ones(buckets), requires_grad=config.learned_gates)
        self.vector = nn.Parameter(torch.randn(buckets, dim) / math.sqrt(dim), requires_grad=config.learned_text)

    def fit(self, texts: Sequence[str]) -> None:
        """Start the gates at the squared idf of trigrams over ``texts`` (training questions and titles).

        Squared, because a question has many more trigrams that all questions share than trigrams of a name,
        and random vectors turn each of them into noise in every score.
        """
        weights = idf_weights(texts, num_buckets=self.gate.numel())
        with torch.no_grad():
            self.gate.copy_(weights.square())

    def forward(self, ids_NL: Tensor, mask_NL: Tensor) -> Tensor:
        return self.bag(ids_NL, self.gates(ids_NL, mask_NL, self.gate), self.vector)

    @staticmethod
    def gates(ids_NL: Tensor, mask_NL: Tensor, gate: Tensor) -> Tensor:
        """The weight (N, L) of each trigram, 0 where there is none."""
        return gate[ids_NL].clamp(min=0.0) * mask_NL

    @staticmethod
    def bag(ids_NL: Tensor, gate_NL: Tensor, vector: Tensor) -> Tensor:
        """The weighted sum of vectors, shortened: (N, E_t)."""
        bag_NE = F.embedding_bag(ids_NL, vector, per_sample_weights=gate_NL, mode="sum")
        return bag_NE / (bag_NE.square().sum(-1, keepdim=True) + 1.0).sqrt()


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


class ImageTower(nn.Module):
    """Two convolutions over patches and a linear map of the whole grid, of unit length.

    The grid is kept (no pooling over places): where a stripe lies is what tells one flag from another. Each layer does
    all that happens until the next one begins, so a tower can be cut between any two.
    """

    def __init__(self, config: RetrieverConfig, *, image_size: int) -> None:
        super().__init__()
        patch = config.image_patch
        if image_size % patch:
            raise ValueError(f"retriever.image_patch is {patch}; it must divide data.image_size ({image_size})")
        grid = (image_size // patch) ** 2
        self.patch = PatchConvolution(3, config.image_width, patch, stride=patch)
        self.mix = MixConvolution(config.image_width, config.image_width, 3, padding=1)
        self.out = GridLinear(config.image_width * grid, config.image_dim)

    def forward(self, image_N3SS: Tensor) -> Tensor:
        return self.out(self.mix(self.patch(image_N3SS)))


class DualEncoder(nn.Module):
    """Embeds rows of text and pictures; the score of two rows is the inner product of their embeddings.

    ``log_scale`` is the contrastive objective's own learned scale (inverse temperature); nothing else
    uses it.
    """

    MAX_SCALE = 100.0

    def __init__(self, config: RetrieverConfig, *, image_size: int, image_transform: str = "square") -> None:
        super().__init__()
        self.config, self.image_transform = config, image_transform
        self.text = TextTower(config)
        self.image = ImageTower(config, image_size=image_size)
        self.log_weight = nn.Parameter(torch.zeros(2))  # of the text and the picture block
        self.log_scale = nn.Parameter(torch.tensor(math.log(14.0)))

    @property
    def dim(self) -> int:
        """E, the width of an embedding."""
        return self.config.text_dim + self.config.image_dim

    def features(self, texts: Sequence[str], images_N3SS: Tensor, has_image_N: Tensor) -> dict[str, Tensor]:
        """Tensors that ``forward`` takes. Pictures are float in [0, 1]; rows without one are ignored."""
        return features(self.config, texts, images_N3SS, has_image_N)

    def forward(self, features: Features) -> Tensor:
        """Embeddings (N, E)."""
        text_NE = self.text(features["trigram"], features["trigram_mask"])
        return self.join(text_NE, self.image(features["image"]), features["has_image"], self.log_weight)

    @staticmethod
    def join(text_NE: Tensor, image_NE: Tensor, has_image_N: Tensor, log_weight: Tensor) -> Tensor:
        """Embeddings from the towers' outputs: weighted, side by side, nothing where there is no picture."""
        weight = (0.5 * log_weight).exp()
        return torch.cat([text_NE * weight[0], image_NE * has_image_N.unsqueeze(1) * weight[1]], dim=1)

    def scale(self) -> Tensor:
        """The contrastive scale, clamped."""
        return self.log_scale.exp().clamp(max=self.MAX_SCALE)


def features(
    config: RetrieverConfig, texts: Sequence[str], images_N3SS: Tensor, has_image_N: Tensor
) -> dict[str, Tensor]:
    """`DualEncoder.features` without an encoder."""
    ids_NL, mask_NL = hashed(texts, num_buckets=config.text_buckets)
    return {"trigram": ids_NL, "trigram_mask": mask_NL, "image": images_N3SS, "has_image": has_image_N}


def rows(features: Features, index: Tensor) -> dict[str, Tensor]:
    """Some rows of a feature dictionary."""
    return {name: tensor[index] for name, tensor in features.items()}
