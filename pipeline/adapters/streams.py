"""Two streams through one stack: rows with all documents, and rows with one document each.

What a model says of an answer given each document alone is what a retriever learns from, and the weights are those
of the fused stream. So every block takes both streams: a second list of blocks would hold each weight twice, and cuts
would have to tie them. The price is that the two cannot be placed apart.

The stream of single documents either trains the model too, or has neither graph nor dropout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.adapters.layers import CachedLayer
from pipeline.adapters.rows import RowEmbedding

Alone = Literal["none", "detached", "trained"]


@contextmanager
def as_evaluated(module: nn.Module) -> Iterator[None]:
    """Within it a module has no graph and no dropout; its parts' modes are put back afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes:
            part.training = mode


class Streams(nn.Module):
    """One block of a stack, for the fused stream [and the stream of single documents].

    Names of parameters are the same with and without the second stream: a checkpoint fits both.

    Args:
        stream: takes what the block reads; with two streams its first half, then its second half.
    """

    def __init__(self, stream: nn.Module, *, alone: Alone) -> None:
        super().__init__()
        self.stream, self.alone = stream, alone

    def forward(self, *reads: Tensor) -> tuple[Tensor, ...]:
        if self.alone == "none":
            return (self.stream(*reads),)
        half = len(reads) // 2
        fused = self.stream(*reads[:half])
        if self.alone == "trained":
            return fused, self.stream(*reads[half:])
        with as_evaluated(self.stream):
            return fused, self.stream(*reads[half:])


class LayerStreams(Streams):
    """Of a layer, which keeps keys and values of the fused stream."""

    def __init__(self, stream: CachedLayer, *, alone: Alone) -> None:
        super().__init__(stream, alone=alone)

    def extend(self, kept: dict[str, Any], *reads: Tensor) -> tuple[Tensor, ...]:
        """``forward`` on new positions; the cache with the earlier ones is in ``kept``.

        Raises:
            ValueError: with the second stream, which is for training.
        """
        if self.alone != "none":
            raise ValueError("answers are generated from all documents; build the program with alone='none'")
        return (self.stream.extend(kept, *reads),)  # type: ignore[operator]


class EmbeddingStreams(nn.Module):
    """`RowEmbedding` of rows with all documents [and of each document alone]."""

    def __init__(self, stream: RowEmbedding, *, alone: Alone) -> None:
        super().__init__()
        self.stream, self.alone = stream, alone

    def forward(self, *reads: Tensor) -> tuple[Tensor, ...]:
        """(B, S, D) [and (P, S1, D)]."""
        fused = self.stream(*reads)
        if self.alone == "none":
            return (fused,)
        if self.alone == "trained":
            return fused, self.stream(*reads, alone=True)
        with as_evaluated(self.stream):
            return fused, self.stream(*reads, alone=True)


class AnswerNorm(nn.Module):
    """The final norm, of the positions that predict the answer: the last ones, as many as ``answer_in`` has."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, sequence_NQD: Tensor, answer_in: Tensor) -> Tensor:
        """(N, T, D); of ``answer_in`` only the length matters."""
        return self.norm(sequence_NQD[:, -answer_in.shape[1] :])


class AnswerHead(nn.Module):
    """Logits of the fused stream [and how likely each document alone makes the target].

    The logits of the P rows stay in here: only one number a target token leaves.
    """

    def __init__(self, lm_head: nn.Module, *, alone: Alone) -> None:
        super().__init__()
        self.lm_head, self.alone = lm_head, alone

    def forward(
        self, state_BTD: Tensor, alone_PTD: Tensor | None = None, target_BT: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Logits (B, T, V) [and log p(target_t | document, question, answer before t) (P, T)]."""
        logits_BTV = self.lm_head(state_BTD)
        if alone_PTD is None:
            return (logits_BTV,)
        assert target_BT is not None
        with torch.set_grad_enabled(self.alone == "trained" and torch.is_grad_enabled()):
            alone_PTV = self.lm_head(alone_PTD)
            target_PT = target_BT.repeat_interleave(alone_PTD.shape[0] // target_BT.shape[0], dim=0)
            log_p = -F.cross_entropy(alone_PTV.flatten(0, 1), target_PT.flatten(), reduction="none")
            return logits_BTV, log_p.view(target_PT.shape)
