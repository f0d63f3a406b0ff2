"""What enters the reader: tokens and picture patches become one context per (question, document) pair.

The context of a pair is laid out ``question tokens | question patches | document patches | document
tokens``. Each token's vector is mixed with its two predecessors', which lets a pointer find "the token
after this one" in one attention step: copying is what a reader from scratch has to learn first.

Shapes: B samples, P pairs, Q question tokens, N patches of one picture, M document tokens,
L = Q + 2N + M, T answer tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.keyed import KeyedDropout
from rag_mm.reader.config import ReaderConfig
from rag_mm.reader.side_streams import SideStreams


class Vision(nn.Module):
    """Block module: pictures of questions (B, 3, S, S) and documents (P, 3, S, S) to patches (.., N, D)."""

    def __init__(self, config: ReaderConfig, *, image_size: int) -> None:
        super().__init__()
        if image_size % config.patch:
            raise ValueError(
                f"reader.patch is {config.patch}; it must divide data.image_size ({image_size}) without rest"
            )
        self.patch = nn.Conv2d(3, config.width, config.patch, stride=config.patch)
        self.position = nn.Parameter(torch.randn((image_size // config.patch) ** 2, config.width) * 0.02)
        self.mlp = nn.Sequential(
            nn.LayerNorm(config.width, bias=False),
            nn.Linear(config.width, config.width),
            nn.GELU(),
            nn.Linear(config.width, config.width),
        )

    def encode(self, image_N3SS: Tensor) -> Tensor:
        """Patches of a batch of pictures."""
        x = self.patch(image_N3SS - 0.5).flatten(2).transpose(1, 2) + self.position
        return x + self.mlp(x)

    def forward(self, question_image: Tensor, document_image: Tensor) -> tuple[Tensor, Tensor]:
        return self.encode(question_image), self.encode(document_image)


class TokenEmbedding(nn.Module):
    """Token vectors mixed with their predecessors' vectors; (N, L) ids to (N, L, D). Padding (id 0) is zero."""

    def __init__(self, config: ReaderConfig, *, vocabulary: int, mix: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, config.width, padding_idx=0)
        self.mix = nn.ModuleList(nn.Linear(config.width, config.width, bias=False) for _ in range(mix))

    def forward(self, token_NL: Tensor, added_NLD: Tensor | None = None) -> Tensor:
        """``added_NLD`` goes to the tokens before they are mixed."""
        own = self.token(token_NL)
        if added_NLD is not None:
            own = own + added_NLD
        mixed = own
        for distance, linear in enumerate(self.mix, start=1):
            mixed = mixed + linear(F.pad(own, (0, 0, distance, 0))[:, : own.shape[1]])
        return mixed

    def extend(self, cache: dict[str, Any], token_NT: Tensor) -> Tensor:
        """Vectors of tokens that follow those of earlier calls; ``cache`` keeps as many as are mixed in."""
        own, num = self.token(token_NT), len(self.mix)
        before = cache.get("before")
        row = torch.cat([own.new_zeros(own.shape[0], num, own.shape[2]) if before is None else before, own], dim=1)
        cache["before"] = row[:, row.shape[1] - num :]
        mixed = own
        for distance, linear in enumerate(self.mix, start=1):
            mixed = mixed + linear(row[:, num - distance : row.shape[1] - distance])
        return mixed


class ContextEmbedding(nn.Module):
    """Block module: question, document and their patches to ``context_PLD``.

    Question rows and patches (B) are repeated for each of their k documents. Document tokens that are words of
    the question are marked (the exact match feature of DrQA, 1704.00051); mixed into their successors, the mark
    tells the first token of a value that its label was asked for.
    """

    def __init__(self, config: ReaderConfig, tokens: TokenEmbedding) -> None:
        super().__init__()
        self.tokens = tokens
        self.kind = nn.Parameter(torch.randn(4, config.width) * 0.02)
        self.match = nn.Parameter(torch.randn(config.width))
        self.dropout = KeyedDropout(config.dropout)

    def forward(
        self,
        question_BQ: Tensor,
        document_PM: Tensor,
        match_PM: Tensor,
        question_patches_BND: Tensor,
        document_patches_PND: Tensor,
    ) -> Tensor:
        k = document_PM.shape[0] // question_BQ.shape[0]
        parts = (
            self.tokens(question_BQ).repeat_interleave(k, dim=0),
            question_patches_BND.repeat_interleave(k, dim=0),
            document_patches_PND,
            self.tokens(document_PM, match_PM.unsqueeze(-1) * self.match),
        )
        return self.dropout(torch.cat([part + self.kind[i] for i, part in enumerate(parts)], dim=1))


class AnswerEmbedding(nn.Module):
    """Block module: the answer so far, (B, T) ids, to the decoder's streams (`rag_mm.reader.side_streams`).

    Streams with a row for each pair (P, T, D) repeat a sample's row for its k documents.
    """

    def __init__(self, tokens: TokenEmbedding, *, side: SideStreams | None = None) -> None:
        super().__init__()
        self.tokens, self.side = tokens, side or SideStreams()

    def forward(self, answer_BT: Tensor, document_PM: Tensor) -> tuple[Tensor, ...]:
        answer = self.tokens(answer_BT)
        pairs, k = document_PM.shape[0], document_PM.shape[0] // answer_BT.shape[0]
        plain = answer.detach()
        streams = [(answer if trained else plain).repeat_interleave(k, dim=0) for trained in self.side.trained]
        if self.side.without:
            streams.append(plain.repeat_interleave(k, dim=0))
        if self.side.attention:
            probe = plain[:, :1] if self.side.attention == "logits" else plain
            streams += [probe.clone(), plain.new_zeros(pairs, probe.shape[1])]
        return answer, *streams

    def extend(self, cache: dict[str, Any], answer_BT: Tensor, document_PM: Tensor) -> tuple[Tensor]:
        """New answer tokens (`pipeline.generate`)."""
        return (self.tokens.extend(cache, answer_BT),)
