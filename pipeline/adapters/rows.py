"""A sample's documents, question and answer as one row of a causal decoder.

The batch gives documents one a row, because that is how they are fetched, scored and shared. Here they become
``opening | document 1 | .. | document k | question | answer``, padding and all: shapes then do not depend on data.
Padding may stand anywhere in a row, so every position counts what is there (padding moves nothing), and a mask hides
it. The price is that padding is computed; documents of like lengths in a batch keep it small.

Parts of a document or question may be *vectors* (pictures), which stand before its tokens.

B samples, k documents each, P = B*k, N rows (B, or P for documents alone), I positions of a document, H of a question,
A of the opening, T of the answer, Q positions that are computed, K positions that are seen (Q and cached ones before).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.adapters.masks import AttentionMask


@dataclass(frozen=True)
class Parts:
    """Token ids, masks or vectors of what rows are made of: (P, I, ..), (B, H, ..) and (B, T, ..); opening (A, ..)."""

    opening: Tensor
    document: Tensor
    question: Tensor
    answer: Tensor

    def fused(self) -> Tensor:
        """All documents of a sample, then its question and answer (B, A + k*I + H + T, ..)."""
        rows = self.question.shape[0]
        documents = self.document.unflatten(0, (rows, -1)).flatten(1, 2)
        return torch.cat([self._opening(rows), documents, self.question, self.answer], dim=1)

    def alone(self) -> Tensor:
        """Each document by itself, then its sample's question and answer (P, A + I + H + T, ..)."""
        rows = self.document.shape[0]
        k = rows // self.question.shape[0]
        question, answer = (part.repeat_interleave(k, dim=0) for part in (self.question, self.answer))
        return torch.cat([self._opening(rows), self.document, question, answer], dim=1)

    def _opening(self, rows: int) -> Tensor:
        return self.opening.expand(rows, *self.opening.shape)


class RowLayout(nn.Module):
    """Positions of what is there, from 0 on, and which is there; of rows with all documents [and with each alone].

    Args:
        reads: names of the masks that it is given, in order: of ``document`` and ``question``, ``answer_in`` (its
            length), and those of vectors and of the answer where there are.
        prefix_masks: names of the masks of vectors before documents and questions; "" where there are none.
    """

    def __init__(self, *, reads: tuple[str, ...], prefix_masks: tuple[str, str], num_opening: int, alone: bool) -> None:
        super().__init__()
        self.reads, self.prefix_masks, self.num_opening, self.with_alone = reads, prefix_masks, num_opening, alone

    def forward(self, *masks: Tensor) -> tuple[Tensor, ...]:
        """``position_ids`` (B, Q) and ``attention_mask`` (B, K), bool; then those of the P rows, if asked."""
        given = dict(zip(self.reads, masks, strict=True))
        num_new = given["answer_in"].shape[1]
        answer = given.get("answer_mask", torch.ones_like(given["answer_in"])).bool()
        if answer.shape[1] < num_new:
            raise ValueError(
                f"answer_mask has {answer.shape[1]} positions and answer_in {num_new}; it must cover them (and cached "
                "ones before them)"
            )
        document, question = (
            torch.cat([given[name].bool() for name in (vectors, tokens) if name], dim=1)
            for vectors, tokens in zip(self.prefix_masks, ("document_mask", "question_mask"), strict=True)
        )
        parts = Parts(answer.new_ones(self.num_opening), document, question, answer)
        cached = answer.shape[1] > num_new
        rows = (parts.fused(), parts.alone()) if self.with_alone else (parts.fused(),)
        result: list[Tensor] = []
        for mask_NK in rows:
            position_NK = (mask_NK.long().cumsum(1) - 1).clamp(min=0)
            result += [position_NK[:, -num_new:] if cached else position_NK, mask_NK]
        return tuple(result)


class RowMask(AttentionMask):
    """Which keys each position of a row sees: itself, and earlier ones that are there and at most ``window`` back.

    A window is counted in positions, not in places of the row, so that padding takes no room in it. Padding sees
    itself too: a softmax over nothing would be NaN.
    """

    def __init__(self, config: Any, like: nn.Module, *, window: int | None = None) -> None:
        super().__init__(config, like)
        self.window = window

    def forward(self, position_NQ: Tensor, mask_NK: Tensor) -> Tensor:
        """(N, 1, Q, K); the queries are the last Q of K positions."""
        position_NK = (mask_NK.long().cumsum(1) - 1).clamp(min=0)

        def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            allowed = (key < query) & mask_NK[row, key]
            if self.window is not None:
                allowed = allowed & (position_NK[row, query] - position_NK[row, key] < self.window)
            return allowed | (key == query)

        return self._make(position_NQ, mask_NK, seen, hide_padding=False)


class LearnedPositions(nn.Module):
    """GPT-2's position embedding, added to what stands at the positions, and the dropout after it."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.wpe, self.drop = body.wpe, body.drop

    def forward(self, vectors_NQD: Tensor, position_NQ: Tensor) -> Tensor:
        """(N, Q, D)."""
        return self.drop(vectors_NQD + self.wpe(position_NQ))


class RowEmbedding(nn.Module):
    """Vectors of whole rows, or of new answer tokens alone where those before are cached.

    Args:
        tokens: the model's own embedding.
        positions: what is done with vectors and positions, if anything.
        reads: names of what it is given, in order.
        opening: token ids in front of every row.
    """

    def __init__(
        self, tokens: nn.Module, positions: nn.Module | None, *, reads: tuple[str, ...], opening: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.tokens, self.positions = tokens, positions
        self.reads, self.opening = reads, opening

    def forward(self, *reads: Tensor, alone: bool = False) -> Tensor:
        """(B, Q, D) of rows with all documents, or (P, Q, D) of each document alone."""
        given = dict(zip(self.reads, reads, strict=True))
        answer_in = given["answer_in"]
        position_NQ = given["alone_position_ids" if alone else "position_ids"]
        if position_NQ.shape[1] == answer_in.shape[1]:  # rows are longer: there is a question
            vectors_NQD = self.tokens(answer_in)
        else:
            opening = torch.tensor(self.opening, dtype=torch.int64, device=answer_in.device)
            document, question = (
                torch.cat([*([given[prefix]] if prefix in given else []), self.tokens(given[name])], dim=1)
                for prefix, name in (("document_vectors", "document"), ("question_vectors", "question"))
            )
            parts = Parts(self.tokens(opening), document, question, self.tokens(answer_in))
            vectors_NQD = parts.alone() if alone else parts.fused()
        return vectors_NQD if self.positions is None else self.positions(vectors_NQD, position_NQ)
