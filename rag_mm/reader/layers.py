"""Transformer layers of the reader: pre-norm, rotary positions, keyed dropout.

Positions are rotary, so attention sees distances only: nothing to learn, nothing to carry between stages,
and no length at which it ends. Masks are boolean with True for what may be attended to.

Shapes: N rows, L context tokens, T answer tokens, D width, H heads, W head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.keyed import KeyedDropout
from rag_mm.reader.config import ReaderConfig
from rag_mm.reader.document_attention import document_attention
from rag_mm.reader.side_streams import Parts, SideStreams


def rotate(x_NHLW: Tensor, position_NL: Tensor | None = None) -> Tensor:
    """Rotary position embedding (Su et al., 2104.09864), frequencies 100^(-2i/W), of positions 0..L-1 or given ones.

    Neighbouring pairs of coordinates are one complex number each, turned by one multiplication: on a CPU
    four times less to read and write than with sines and cosines apart.
    """
    length, width = x_NHLW.shape[2], x_NHLW.shape[3]
    frequency = 100.0 ** (-torch.arange(0, width, 2, device=x_NHLW.device, dtype=x_NHLW.dtype) / width)
    if position_NL is None:
        place = torch.arange(length, device=x_NHLW.device, dtype=x_NHLW.dtype)[:, None]
    else:
        place = position_NL.to(x_NHLW.dtype)[:, None, :, None]
    angle = place * frequency
    turn = torch.polar(torch.ones_like(angle), angle)
    pairs = torch.view_as_complex(x_NHLW.contiguous().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(-2)


class Attention(nn.Module):
    """Multi-head attention of queries over a context; with ``rotary``, positions count in both.

    Positions are 0, 1, .. in queries and context alike, unless they are given.
    """

    def __init__(self, config: ReaderConfig, *, rotary: bool) -> None:
        super().__init__()
        self.heads, self.rotary = config.heads, rotary
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key_value = nn.Linear(config.width, 2 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def project(self, context_NLD: Tensor, position_NL: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values (N, H, L, W) of a context: what a decoder can keep between tokens."""
        k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.key_value(context_NLD).chunk(2, dim=-1))
        return (rotate(k, position_NL), v) if self.rotary else (k, v)

    def asked(self, x_NTD: Tensor, position_NT: Tensor | None = None) -> Tensor:
        """Queries (N, H, T, W)."""
        q = self.query(x_NTD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return rotate(q, position_NT) if self.rotary else q

    def forward(
        self,
        x_NTD: Tensor,
        context: tuple[Tensor, Tensor],
        mask_NTL: Tensor | None,
        position_NT: Tensor | None = None,
        *,
        causal: bool = False,
    ) -> Tensor:
        """Attend from x to a projected context."""
        q = self.asked(x_NTD, position_NT)
        mask = None if mask_NTL is None else mask_NTL.unsqueeze(1)
        y = F.scaled_dot_product_attention(q, *context, attn_mask=mask, is_causal=causal)
        return self.out(y.transpose(1, 2).flatten(2))

    def extend(
        self, cache: dict[str, Any], x_NTD: Tensor, mask_NTL: Tensor | None, position_NT: Tensor | None
    ) -> Tensor:
        """Attend from new places to those of earlier calls, which ``cache`` keeps, and to the new ones."""
        key, value = self.project(x_NTD, position_NT)
        if "key" in cache:
            key, value = torch.cat([cache["key"], key], dim=2), torch.cat([cache["value"], value], dim=2)
        cache["key"], cache["value"] = key, value
        return self(x_NTD, (key, value), mask_NTL, position_NT)


class FeedForward(nn.Sequential):
    """Two linear maps around a GELU."""

    def __init__(self, config: ReaderConfig) -> None:
        super().__init__(
            nn.Linear(config.width, config.ffn_width), nn.GELU(), nn.Linear(config.ffn_width, config.width)
        )


class EncoderLayer(nn.Module):
    """Block module: ``(context_PLD, mask_PL) -> context_PLD``, one (question, document) pair a row."""

    def __init__(self, config: ReaderConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width, bias=False), nn.LayerNorm(config.width, bias=False)
        self.attention = Attention(config, rotary=True)
        self.ffn = FeedForward(config)

    def forward(self, context_PLD: Tensor, mask_PL: Tensor) -> Tensor:
        h = self.norm1(context_PLD)
        x = context_PLD + self.attention(h, self.attention.project(h), mask_PL.unsqueeze(1))
        return x + self.ffn(self.norm2(x))


class DecoderLayer(nn.Module):
    """Causal self-attention over the answer, attention over the context, feed-forward.

    As a block module: ``(context_PLD, mask_PL, answer_BTD, *side streams)`` to the same streams
    (`rag_mm.reader.side_streams`). The answer stream attends to all documents of its question at once; side streams
    repeat it for each document by itself, or for all documents but one, for objectives that ask what each document
    is worth: without graph and without dropout, unless one trains the reader too.
    """

    def __init__(self, config: ReaderConfig, *, side: SideStreams | None = None) -> None:
        super().__init__()
        self.side = side or SideStreams()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(config.width, bias=False) for _ in range(3))
        self.self_attention = Attention(config, rotary=True)
        self.cross_attention = Attention(config, rotary=False)
        self.ffn = FeedForward(config)
        self.dropout = KeyedDropout(config.dropout)

    def stream(self, x_NTD: Tensor, context: tuple[Tensor, Tensor], mask_NTL: Tensor, *, dropout: bool) -> Tensor:
        """The layer on one stream, over a context that ``cross_attention`` has projected.

        Where the context has fewer rows (C) than the stream, several rows of the stream read one of it, and the mask
        is (C, N/C * T, L).
        """
        drop: nn.Module = self.dropout if dropout else nn.Identity()
        x = x_NTD + drop(self._before(x_NTD))
        asked = self.norm2(x).unflatten(0, (context[0].shape[0], -1)).flatten(1, 2)
        x = x + drop(self.cross_attention(asked, context, mask_NTL).view(x.shape))
        return x + drop(self.ffn(self.norm3(x)))

    def _before(self, x_NTD: Tensor) -> Tensor:
        """What the answer so far adds."""
        h = self.norm1(x_NTD)
        return self.self_attention(h, self.self_attention.project(h), None, causal=True)

    def forward(
        self, context_PLD: Tensor, mask_PL: Tensor, answer_BTD: Tensor, *side_streams: Tensor
    ) -> tuple[Tensor, ...]:
        rows = answer_BTD.shape[0]
        fused, mask_BJ = self.cross_attention.project(fuse(context_PLD, rows)), fuse(mask_PL, rows)
        streams = [self.stream(answer_BTD, fused, mask_BJ.unsqueeze(1), dropout=True)]
        side = self.side.parts(side_streams)
        if side.single:
            with torch.set_grad_enabled(any(side.trained) and torch.is_grad_enabled()):
                single = self.cross_attention.project(context_PLD)
        for x_PTD, trained in zip(side.single, side.trained, strict=True):
            with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
                streams.append(self.stream(x_PTD, single, mask_PL.unsqueeze(1), dropout=trained))
        with torch.no_grad():
            return (*streams, *self._without_graph(side, fused, mask_BJ, k=mask_PL.shape[0] // rows))

    def _without_graph(self, side: Parts, fused: tuple[Tensor, Tensor], mask_BJ: Tensor, *, k: int) -> list[Tensor]:
        """The streams over all documents but one, and over all of them with what they are attended to."""
        found = []
        if side.without is not None:
            mask_BkTJ = without_one(mask_BJ, k).unsqueeze(2).expand(-1, -1, side.without.shape[1], -1)
            found.append(self.stream(side.without, fused, mask_BkTJ.flatten(1, 2), dropout=False))
        if side.probe is not None and side.attention is not None:
            asked = self.cross_attention.asked(self.norm2(side.probe + self._before(side.probe)))
            attention_BkT = document_attention(asked, *fused, mask_BJ, k=k, kind=self.side.attention or "logits")
            found.append(self.stream(side.probe, fused, mask_BJ.unsqueeze(1), dropout=False))
            found.append(side.attention + attention_BkT.flatten(0, 1))
        return found

    def extend(self, cache: dict[str, Any], context_PLD: Tensor, mask_PL: Tensor, answer_BTD: Tensor) -> tuple[Tensor]:
        """New places of the answer (`pipeline.generate`): the context is projected once, earlier places are kept."""
        rows, new = answer_BTD.shape[:2]
        if not cache:
            cache["cross_key"], cache["cross_value"] = self.cross_attention.project(fuse(context_PLD, rows))
            cache["mask"] = fuse(mask_PL, rows)
        past = cache["key"].shape[2] if "key" in cache else 0
        place = torch.arange(past + new, device=answer_BTD.device)
        causal_1TL = None if new == 1 else (place <= place[past:, None]).unsqueeze(0)
        x = answer_BTD + self.self_attention.extend(cache, self.norm1(answer_BTD), causal_1TL, place[None, past:])
        context = cache["cross_key"], cache["cross_value"]
        x = x + self.cross_attention(self.norm2(x), context, cache["mask"].unsqueeze(1))
        return (x + self.ffn(self.norm3(x)),)


def fuse(pairs: Tensor, num_samples: int) -> Tensor:
    """(B*k, L, ...) -> (B, k*L, ...): the documents of each question one after another."""
    return pairs.unflatten(0, (num_samples, -1)).flatten(1, 2)


def without_one(mask_BJ: Tensor, k: int) -> Tensor:
    """A mask over k documents in a row, once for each of them, which it leaves out (B, k, J)."""
    here = torch.eye(k, dtype=torch.bool, device=mask_BJ.device).repeat_interleave(mask_BJ.shape[1] // k, dim=1)
    return mask_BJ.unsqueeze(1) & ~here
