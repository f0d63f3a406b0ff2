"""What a reader decodes beside its answer over all documents, because an objective asks what a document is worth.

Every block between the embedding and the head takes these streams after the fused one and hands them on in the same
order; a block's module is told by `SideStreams` which there are.

Shapes: B samples, k documents each, P = B*k pairs, S positions of a stream, A answer positions that ``attention`` is of
(1 or all), D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rag_mm.objectives import ATTENTION, PROBE, WITHOUT, ObjectivesConfig


@dataclass(frozen=True)
class SideStreams:
    """Which streams there are, for an objective's configuration; by default none, as in answering.

    Attributes:
        single: names of the streams (P, S, D) that answer from each document alone.
        trained: for each of them, whether it has a graph and dropout. The streams below have neither.
        without: a stream (P, S, D) that answers from all documents but one.
        attention: what is summed over layers of the attention of ``probe`` (B, S, D), a copy of the fused stream
            without dropout: ``attention`` (P, A); "": neither of the two streams is there.
    """

    single: tuple[str, ...] = ()
    trained: tuple[bool, ...] = ()
    without: bool = False
    attention: Literal["", "logits", "values"] = ""

    @classmethod
    def of(cls, objective: ObjectivesConfig) -> SideStreams:
        attention = objective.adist_from if objective.adist > 0 else ""
        return cls(objective.streams, objective.trained_streams, objective.loop > 0, attention)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the streams, in the order in which blocks take and write them."""
        without = (WITHOUT,) if self.without else ()
        return (*self.single, *without, *((PROBE, ATTENTION) if self.attention else ()))

    @property
    def pairs(self) -> tuple[str, ...]:
        """Those of them that have a row for each pair."""
        return tuple(name for name in self.names if name != PROBE)

    def parts(self, tensors: Sequence[Tensor]) -> Parts:
        """Streams that came in the order of ``names``."""
        named = dict(zip(self.names, tensors, strict=True))
        single = tuple(named[name] for name in self.single)
        return Parts(single, self.trained, named.get(WITHOUT), named.get(PROBE), named.get(ATTENTION))


@dataclass(frozen=True)
class Parts:
    """The streams of one call; None where there is no such stream."""

    single: tuple[Tensor, ...]
    trained: tuple[bool, ...]
    without: Tensor | None
    probe: Tensor | None
    attention: Tensor | None


def others(k: int) -> Tensor:
    """Row j: the places of all of k documents but the j-th (k, k - 1)."""
    rows = [[place for place in range(k) if place != j] for j in range(k)]  # no mask: shapes would depend on data
    return torch.tensor(rows, dtype=torch.int64).view(k, k - 1)


def without_each(pairs: Tensor, num_samples: int) -> Tensor:
    """(B*k, L, ..) to (B*k, (k-1)*L, ..): in row j of a sample, its documents but the j-th one after another."""
    documents = pairs.unflatten(0, (num_samples, -1))
    return documents[:, others(documents.shape[1]).to(pairs.device)].flatten(0, 1).flatten(1, 2)
