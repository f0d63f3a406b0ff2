"""Block programs to measure on: one of unequal parts, and one of equal blocks.

Shapes: B samples, K documents, N picture patches, Q question tokens, L document tokens, S pair tokens,
T answer tokens, D width, V vocabulary. Documents and pairs have B*K rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import Block, BlockProgram


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model of unequal parts; the defaults take some tens of ms a stage of two and a sample."""

    documents: int = 8
    patches: int = 49
    question: int = 16
    document: int = 24
    pair: int = 144
    answer: int = 8
    width: int = 128
    vocabulary: int = 16_000
    vision_layers: int = 4
    query_layers: int = 2
    document_layers: int = 2
    encoder_layers: int = 6
    decoder_layers: int = 6


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        query_BHTE = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key_BHCE, value_BHCE = self.key_value(context).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query_BHTE, key_BHCE, value_BHCE)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Self-attention, cross-attention if there is a context, and a feed-forward part; norm first."""

    def __init__(self, width: int, *, crossed: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2 + crossed)])
        self.attention = _Attention(width)
        self.crossed = _Attention(width) if crossed else None
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y)
        if self.crossed is not None and context is not None:
            pairs_BCD = context.reshape(x.shape[0], -1, x.shape[-1])  # all documents of a sample in one row
            x = x + self.crossed(self.norms[2](x), pairs_BCD)
        return x + self.feed(self.norms[1](x))


class _Score(nn.Module):
    """Mean-pooled question and documents, and their inner products."""

    def forward(self, question: Tensor, document: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        question_BD, document_BKD = question.mean(1), document.mean(1).unflatten(0, (question.shape[0], -1))
        scores_BK = torch.einsum("bd,bkd->bk", question_BD, document_BKD) / question_BD.shape[-1] ** 0.5
        return scores_BK, question_BD, document_BKD.flatten(0, 1)


class _Pair(nn.Module):
    """Tokens of (question, document) pairs, with picture, question and document vectors in front."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)

    def forward(self, ids: Tensor, picture: Tensor, question: Tensor, document: Tensor) -> Tensor:
        per_sample = torch.stack([picture.mean(1), question], dim=1)
        repeated = per_sample.repeat_interleave(ids.shape[0] // picture.shape[0], dim=0)
        return torch.cat([repeated, document[:, None], self.table(ids)], dim=1)


class _Head(nn.Module):
    """Cross entropy of the answer, and of the retrieved documents' scores."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, y: Tensor, answer: Tensor, gold: Tensor, scores: Tensor, weight: Tensor) -> Tensor:
        logits = self.out(self.norm(y))
        words_B = functional.cross_entropy(logits.transpose(1, 2), answer, reduction="none").mean(1)
        found_B = functional.cross_entropy(scores, gold, reduction="none")
        return torch.stack([words_B, found_B], dim=1) * weight[:, None]


def unequal_program(sizes: Sizes, *, seed: int = 0) -> BlockProgram:
    """Vision tower, query and document towers, encoder over all pairs, decoder: each of another cost."""
    torch.manual_seed(seed)
    d, v = sizes.width, sizes.vocabulary
    blocks = [Block("vision.patch", nn.Linear(3 * 16 * 16, d), ("picture",), ("v",))]
    blocks += [Block(f"vision.{i}", Layer(d), ("v",), ("v",)) for i in range(sizes.vision_layers)]
    blocks.append(Block("query.embed", nn.Embedding(v, d), ("question_ids",), ("q",)))
    blocks += [Block(f"query.{i}", Layer(d), ("q",), ("q",)) for i in range(sizes.query_layers)]
    blocks.append(Block("document.embed", nn.Embedding(v, d), ("document_ids",), ("d",)))
    blocks += [Block(f"document.{i}", Layer(d), ("d",), ("d",)) for i in range(sizes.document_layers)]
    blocks.append(Block("score", _Score(), ("q", "d"), ("scores", "question", "document")))
    blocks.append(Block("pair", _Pair(v, d), ("pair_ids", "v", "question", "document"), ("ctx",)))
    blocks += [Block(f"encoder.{i}", Layer(d), ("ctx",), ("ctx",)) for i in range(sizes.encoder_layers)]
    blocks.append(Block("target", nn.Embedding(v, d), ("target_ids",), ("y",)))
    blocks += [Block(f"decoder.{i}", Layer(d, crossed=True), ("y", "ctx"), ("y",)) for i in range(sizes.decoder_layers)]
    blocks.append(Block("head", _Head(v, d), ("y", "answer", "gold", "scores", "weight"), ("losses",)))
    return BlockProgram(
        blocks,
        inputs=("picture", "question_ids", "document_ids", "pair_ids", "target_ids", "answer", "gold", "weight"),
        outputs=("losses",),
        axes={name: "pair" for name in ("document_ids", "pair_ids", "d", "document", "ctx")},
    )


def unequal_batch(sizes: Sizes, num_samples: int, *, seed: int = 1) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def ids(rows: int, length: int) -> Tensor:
        return torch.randint(sizes.vocabulary, (rows, length), generator=g)

    rows = num_samples * sizes.documents
    return {
        "picture": torch.randn(num_samples, sizes.patches, 3 * 16 * 16, generator=g),
        "question_ids": ids(num_samples, sizes.question),
        "document_ids": ids(rows, sizes.document),
        "pair_ids": ids(rows, sizes.pair),
        "target_ids": ids(num_samples, sizes.answer),
        "answer": ids(num_samples, sizes.answer),
        "gold": torch.randint(sizes.documents, (num_samples,), generator=g),
        "weight": torch.full((num_samples,), 1.0 / num_samples),
    }


class _Mean(nn.Module):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return x.square().mean((1, 2))[:, None] * weight[:, None]


def equal_program(*, num_layers: int = 8, width: int = 192, seed: int = 0) -> BlockProgram:
    """Layers of one size and a loss that costs next to nothing."""
    torch.manual_seed(seed)
    blocks = [Block(f"layer.{i}", Layer(width), ("x",), ("x",)) for i in range(num_layers)]
    blocks.append(Block("loss", _Mean(), ("x", "weight"), ("losses",)))
    return BlockProgram(blocks, inputs=("x", "weight"), outputs=("losses",))


def equal_batch(num_samples: int, *, length: int = 64, width: int = 192, seed: int = 1) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(num_samples, length, width, generator=g),
        "weight": torch.full((num_samples,), 1.0 / num_samples),
    }
