"""What a kind of tower is: texts or pictures to tensors without any weights, and a module from those to vectors.

The two are apart because tensors are also made where no weights are: in the workers that read ahead. Towers run twice
a step (forward without graph, then again with graph when the gradients of the embeddings are known), so their forward
must be a function of the row alone: no batch statistics, no draws from generator state.

Shapes: N rows, E_t or E_i the width of a part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from retriever.config import RetrieverConfig


class Tower(nn.Module):
    """Rows to vectors (N, dim), of length 1 at most.

    Attributes:
        dim: width of a vector.
        inputs: names of the feature tensors that ``forward`` takes, in order.
    """

    dim: int
    inputs: tuple[str, ...]

    def part(self, features: Mapping[str, Tensor]) -> Tensor:
        """Vectors (N, dim) of a feature dictionary's rows."""
        vectors: Tensor = self(*(features[name] for name in self.inputs))
        return vectors


class TextBackend(ABC):
    """A kind of text tower.

    Attributes:
        truncated: texts that ``features`` has cut off so far.
        limited_by: the option that says where, if there is one.
    """

    limited_by = ""

    def __init__(self, config: RetrieverConfig) -> None:
        self.config = config
        self.truncated = 0

    @abstractmethod
    def features(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """The tower's inputs, N leading; ``has_text`` (N,) bool too, if texts that are not blank can be empty to it."""

    @abstractmethod
    def tower(self, *, weights: bool = True) -> Tower:
        """A tower; ``weights`` False: its own file of weights need not be read, they are about to be replaced."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """All but the weights that decides what a vector means: architecture, pooling, tokenizer, limits."""


class ImageBackend(ABC):
    """A kind of picture tower; its one input is ``image`` (N, 3, image_size, image_size) in [0, 1]."""

    def __init__(self, config: RetrieverConfig, image_size: int) -> None:
        self.config, self.image_size = config, image_size

    @abstractmethod
    def tower(self, *, weights: bool = True) -> Tower:
        """A tower; see `TextBackend.tower`."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """All but the weights that decides what a vector means: architecture, resizing, normalisation."""
