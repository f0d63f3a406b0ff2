"""What towers take of questions and documents, made without any weights: here, or in a worker that reads ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from retriever.config import RetrieverConfig
from retriever.towers.kinds import text_backend

Features = Mapping[str, Tensor]
Side = Literal["query", "document"]
IS_DOCUMENT = "is_document"


class Featurizer:
    """Texts and pictures to feature tensors with rows leading: the text tower's inputs, ``has_text``, ``image``,
    ``has_image`` and, where a side is given, ``is_document``.

    Attributes:
        needs_side: whether questions and documents are treated differently, so that rows must say which they are.
    """

    def __init__(self, config: RetrieverConfig) -> None:
        self.text = text_backend(config)
        self.prefix = {"query": config.query_prefix, "document": config.document_prefix}
        self.needs_side = config.towers == "separate" or any(self.prefix.values())

    @property
    def truncated(self) -> int:
        """Texts that were cut off so far."""
        return 0 if self.text is None else self.text.truncated

    def count_truncated(self, count: int) -> None:
        """Texts that another process cut off, which works for this one."""
        if self.text is not None:
            self.text.truncated += count

    @property
    def limit(self) -> str:
        """What decided where they were cut."""
        own = self.text is not None and self.text.limited_by
        return own or "the text tower's own length"

    def said_truncated(self, count: int, what: str) -> str:
        """A sentence about texts that were cut off; ``what`` they were."""
        return f"{what} were truncated {count} times for the retriever ({self.limit})"

    def __call__(
        self, texts: Sequence[str], images_N3SS: Tensor, has_image_N: Tensor, *, side: Side | None = None
    ) -> dict[str, Tensor]:
        """Features of N rows.

        Args:
            images_N3SS: float in [0, 1]; rows without one are ignored.
            has_image_N: 1 or 0.
            side: whether these are questions or documents; may be left out where both are treated alike.

        Raises:
            ValueError: if there is no side where it matters.
        """
        if side is None and self.needs_side:
            raise ValueError("questions and documents have towers or prefixes of their own here; say side=...")
        prefix = "" if side is None else self.prefix[side]
        tensors: dict[str, Tensor] = {}
        there = torch.tensor([bool(text.strip()) for text in texts], dtype=torch.bool)
        if self.text is not None:
            tensors = self.text.features([prefix + text for text in texts])
            there &= tensors.pop("has_text", there)
        tensors |= {"has_text": there.float(), "image": images_N3SS, "has_image": has_image_N}
        if side is not None:
            tensors[IS_DOCUMENT] = torch.full((len(texts),), side == "document")
        return tensors


def rows(features: Features, index: Tensor) -> dict[str, Tensor]:
    """Some rows of a feature dictionary."""
    return {name: tensor[index] for name, tensor in features.items()}
