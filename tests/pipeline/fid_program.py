"""A small fusion-in-decoder program with everything that makes cutting hard.

One embedding tied over three blocks (encoder, decoder, head), encoder blocks on B*k pair rows, context
that every decoder block reads, keyed dropout, a mask in the carry, uneven weights, and passage scores
(a leaf that requires gradients) that only the last block reads.

Shapes: B samples, K passages, S passage tokens, T target tokens, D width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import Block, BlockProgram
from pipeline.keyed import KeyedDropout

K, S, T, D, V = 3, 5, 4, 8, 17


class Embed(nn.Module):
    def __init__(self, table: nn.Embedding, p: float) -> None:
        super().__init__()
        self.table, self.dropout = table, KeyedDropout(p)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.dropout(self.table(ids)), ids != 0


class Encode(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.attend = nn.Linear(D, 3 * D)
        self.out, self.dropout = nn.Linear(D, D), KeyedDropout(p)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.attend(x).chunk(3, dim=-1)
        scores = (q @ k.transpose(1, 2) / D**0.5).masked_fill(~mask[:, None], -1e9)
        # Transposed on purpose: what leaves the block is not contiguous.
        return (x + self.out(self.dropout(scores.softmax(-1)) @ v)).transpose(1, 2).contiguous().transpose(1, 2)


class Target(nn.Module):
    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class Decode(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.query, self.out, self.dropout = nn.Linear(D, D), nn.Linear(D, D), KeyedDropout(p)

    def forward(self, y: Tensor, ctx: Tensor, mask: Tensor) -> Tensor:
        y = functional.relu(y, inplace=True)
        ctx = ctx.reshape(y.shape[0], -1, D)
        mask = mask.reshape(y.shape[0], 1, -1)
        scores = (self.query(y) @ ctx.transpose(1, 2)).masked_fill(~mask, -1e9)
        return y + self.dropout(self.out(scores.softmax(-1) @ ctx))


class Head(nn.Module):
    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, y: Tensor, labels: Tensor, weight: Tensor, scores: Tensor, ctx: Tensor) -> tuple[Tensor, Tensor]:
        logits = y @ self.table.weight.T
        ce = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        strength = ctx.detach().mean((1, 2)).view(scores.shape).softmax(-1)
        kl = -(strength * (scores * self.temperature).log_softmax(-1)).sum(-1)
        losses = torch.stack([ce.sum(1), kl], dim=1) * weight[:, None]
        return losses, (logits.argmax(-1) == labels).float().mean(1)


def fid_program(*, p: float = 0.2, dtype: torch.dtype = torch.float64, seed: int = 0) -> BlockProgram:
    """Six blocks; build twice with one seed for equal parameters."""
    torch.manual_seed(seed)
    table = nn.Embedding(V, D)
    blocks = [
        Block("embed", Embed(table, p), ("passages",), ("ctx", "ctx_mask")),
        Block("encoder.0", Encode(p), ("ctx", "ctx_mask"), ("ctx",)),
        Block("encoder.1", Encode(p), ("ctx", "ctx_mask"), ("ctx",)),
        Block("target", Target(table), ("target",), ("y",)),
        Block("decoder.0", Decode(p), ("y", "ctx", "ctx_mask"), ("y",)),
        Block("head", Head(table), ("y", "labels", "weight", "scores", "ctx"), ("losses", "correct")),
    ]
    program = BlockProgram(
        blocks,
        inputs=("sample_id", "passages", "target", "labels", "weight", "scores"),
        outputs=("losses", "correct"),
        axes={"passages": "pair", "ctx": "pair", "ctx_mask": "pair"},
    )
    return program.to(dtype)


def fid_batch(
    num_samples: int = 6, *, length: int = S, dtype: torch.dtype = torch.float64, seed: int = 1
) -> dict[str, Tensor]:
    """A batch with uneven weights (one sample has weight 0) and scores that need gradients."""
    g = torch.Generator().manual_seed(seed)
    passages = torch.randint(1, V, (num_samples * K, length), generator=g)
    passages[::2, -1] = 0
    weight = torch.rand(num_samples, generator=g, dtype=dtype)
    weight[1] = 0.0
    return {
        "sample_id": torch.arange(100, 100 + num_samples) * 7,
        "passages": passages,
        "target": torch.randint(1, V, (num_samples, T), generator=g),
        "labels": torch.randint(1, V, (num_samples, T), generator=g),
        "weight": weight / weight.sum(),
        "scores": torch.randn(num_samples, K, generator=g, dtype=dtype).requires_grad_(),
    }
