"""One causal sequence a sample: where its parts lie, what may be attended to, and a layer over it.

The batch comes as fid reads it, one (question, document) pair a row. Here a sample is one row
``documents one after another | question | answer``, each document and the question with its picture's patches in
front; other streams have a row ``document | question | answer`` for each document alone, or one without that document
(`rag_mm.reader.side_streams`). Masks and positions are
made anew in every block from batch inputs: cheaper than sending them between stages.

Positions count what is there, so padding inside a sequence moves nothing.

Shapes: B samples, k documents each, P = B*k pairs, N rows (B or P), Q question tokens, M document tokens, L = tokens
of a pair (``question | its patches | document's patches | document``), J context tokens of a row, T answer tokens,
S = J + T, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.keyed import KeyedDropout
from rag_mm.reader.config import ReaderConfig
from rag_mm.reader.layers import Attention, FeedForward, fuse
from rag_mm.reader.side_streams import SideStreams, without_each


@dataclass(frozen=True)
class Layout:
    """Takes the pairs of a batch apart and joins them to rows of sequences.

    Attributes:
        num_patches: patches of one picture.
    """

    num_patches: int

    def parts(self, pairs_PL: Tensor, question_BQ: Tensor) -> tuple[Tensor, Tensor]:
        """Of a pair's mask or tokens: documents (P, patches + M), and each sample's question once (B, patches + Q)."""
        rows, start = question_BQ.shape
        k, end = pairs_PL.shape[0] // rows, start + self.num_patches
        question = torch.cat([pairs_PL[::k, start:end], pairs_PL[::k, :start]], dim=1)
        return pairs_PL[:, end:], question

    @staticmethod
    def fused(documents: Tensor, question: Tensor) -> Tensor:
        """All documents of a sample, then its question: (P, I, ..) and (B, H, ..) to (B, k*I + H, ..)."""
        return torch.cat([fuse(documents, question.shape[0]), question], dim=1)

    @staticmethod
    def without(documents: Tensor, question: Tensor) -> Tensor:
        """All documents of a sample but one, then the question: (P, I, ..) and (B, H, ..) to (P, (k-1)*I + H, ..)."""
        num_samples = question.shape[0]
        k = documents.shape[0] // num_samples
        return torch.cat([without_each(documents, num_samples), question.repeat_interleave(k, dim=0)], dim=1)

    @staticmethod
    def alone(documents: Tensor, question: Tensor) -> Tensor:
        """One document, then the question: (P, I, ..) and (B, H, ..) to (P, I + H, ..)."""
        k = documents.shape[0] // question.shape[0]
        return torch.cat([documents, question.repeat_interleave(k, dim=0)], dim=1)


@dataclass(frozen=True)
class Reach:
    """What each place of a sequence may attend to (N, S, S), True where it may, and its position (N, S)."""

    allowed_NSS: Tensor
    position_NS: Tensor

    @classmethod
    def of(cls, mask_NJ: Tensor, num_answer: int, *, start: int = 0) -> Reach:
        """Causal over a context, of which True in the mask is there, and so many answer tokens after it.

        Every place attends to itself, padding too: a softmax over nothing would be NaN.

        Args:
            start: leave out the rows of the places before it; what the others reach stays whole.
        """
        valid = torch.cat([mask_NJ, mask_NJ.new_ones(mask_NJ.shape[0], num_answer)], dim=1)
        place = torch.arange(valid.shape[1], device=valid.device)
        causal, itself = place <= place[start:, None], place == place[start:, None]
        position = (valid.long().cumsum(1) - 1).clamp(min=0)
        return cls(causal & valid.unsqueeze(1) | itself, position[:, start:])


class CausalLayer(nn.Module):
    """Causal self-attention and feed-forward over whole sequences.

    As a block module: ``(sequence_BSD, question_BQ, mask_PL, *side streams)`` to the same streams.
    """

    def __init__(self, config: ReaderConfig, layout: Layout, *, side: SideStreams | None = None) -> None:
        super().__init__()
        self.layout, self.side = layout, side or SideStreams()
        self.norm1, self.norm2 = nn.LayerNorm(config.width, bias=False), nn.LayerNorm(config.width, bias=False)
        self.attention = Attention(config, rotary=True)
        self.ffn = FeedForward(config)
        self.dropout = KeyedDropout(config.dropout)

    def stream(self, x_NSD: Tensor, reach: Reach, *, dropout: bool) -> Tensor:
        """The layer on one stream."""
        drop: nn.Module = self.dropout if dropout else nn.Identity()
        h = self.norm1(x_NSD)
        context = self.attention.project(h, reach.position_NS)
        x = x_NSD + drop(self.attention(h, context, reach.allowed_NSS, reach.position_NS))
        return x + drop(self.ffn(self.norm2(x)))

    def extend(
        self, cache: dict[str, Any], sequence_BSD: Tensor, question_BQ: Tensor, mask_PL: Tensor
    ) -> tuple[Tensor]:
        """The whole sequence at first, then what is new of the answer (`pipeline.generate`)."""
        if not cache:
            cache["mask"] = self.layout.fused(*self.layout.parts(mask_PL, question_BQ))
        start = cache["key"].shape[2] if "key" in cache else 0
        num_answer = start + sequence_BSD.shape[1] - cache["mask"].shape[1]
        reach = Reach.of(cache["mask"], num_answer, start=start)
        h = self.norm1(sequence_BSD)
        x = sequence_BSD + self.attention.extend(cache, h, reach.allowed_NSS, reach.position_NS)
        return (x + self.ffn(self.norm2(x)),)

    def forward(
        self, sequence_BSD: Tensor, question_BQ: Tensor, mask_PL: Tensor, *side_streams: Tensor
    ) -> tuple[Tensor, ...]:
        mask = self.layout.parts(mask_PL, question_BQ)
        streams = [self.stream(sequence_BSD, reach_of(sequence_BSD, self.layout.fused(*mask)), dropout=True)]
        side = self.side.parts(side_streams)
        if side.single:
            reach = reach_of(side.single[0], self.layout.alone(*mask))
        for x_PSD, trained in zip(side.single, side.trained, strict=True):
            with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
                streams.append(self.stream(x_PSD, reach, dropout=trained))
        if side.without is not None:
            with torch.no_grad():
                reach = reach_of(side.without, self.layout.without(*mask))
                streams.append(self.stream(side.without, reach, dropout=False))
        return tuple(streams)


def reach_of(sequence_NSD: Tensor, mask_NJ: Tensor) -> Reach:
    """Of a whole sequence, of which the mask tells the context."""
    return Reach.of(mask_NJ, sequence_NSD.shape[1] - mask_NJ.shape[1])
