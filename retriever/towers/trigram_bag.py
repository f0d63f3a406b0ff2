"""Text as a gated bag of hashed trigrams: no vocabulary, no pretraining, and a lexical matcher from the start.

Gates start at the trigrams' idf, vectors at random near-orthogonal directions. The length of the bag is kept up to
1: a question whose every word is a stop word ("the capital of this country") has almost no text. Word order and meaning
are beyond it.

Shapes: N rows, L trigrams, E_t width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retriever.config import RetrieverConfig
from retriever.towers.interface import TextBackend, Tower
from retriever.trigrams import hashed, idf_weights


class TextTower(Tower):
    """Gated bag of hashed trigrams: ``sum_i gate_i * vector_i``, shortened to a length below 1."""

    inputs = ("trigram", "trigram_mask")

    def __init__(self, config: RetrieverConfig) -> None:
        super().__init__()
        buckets, self.dim = config.text_buckets, config.text_dim
        self.gate = nn.Parameter(torch.ones(buckets), requires_grad=config.learned_gates)
        self.vector = nn.Parameter(
            torch.randn(buckets, self.dim) / math.sqrt(self.dim), requires_grad=config.learned_text
        )

    def fit(self, texts: Iterable[str]) -> None:
        """Start the gates at the squared idf of trigrams over ``texts`` (training questions and titles), read once.

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


class TrigramText(TextBackend):
    """``retriever.text: trigrams``."""

    def features(self, texts: Sequence[str]) -> dict[str, Tensor]:
        ids_NL, mask_NL = hashed(texts, num_buckets=self.config.text_buckets)
        return {"trigram": ids_NL, "trigram_mask": mask_NL, "has_text": mask_NL.any(1)}

    def tower(self, *, weights: bool = True) -> TextTower:
        return TextTower(self.config)

    def describe(self) -> dict[str, Any]:
        return {"kind": "trigrams", "buckets": self.config.text_buckets, "dim": self.config.text_dim}
