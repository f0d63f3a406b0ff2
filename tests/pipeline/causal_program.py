"""A small encoder-decoder language model as a program, with and without caches.

Shapes: R rows, S source positions, T positions, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipeline import Block, BlockProgram

D, V, END = 8, 6, 4


class Encode(nn.Module):
    """Counts its calls: it depends on no token and must run once."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.calls = nn.Embedding(V, D), 0

    def forward(self, source_RS: Tensor) -> Tensor:
        self.calls += 1
        return self.table(source_RS)


class Positions(nn.Module):
    """Bias by distance, without a sample axis: (T, K) for T new of K positions."""

    def forward(self, tokens_RT: Tensor, length_K: Tensor) -> Tensor:
        new, keys = tokens_RT.shape[1], length_K.shape[0]
        distance = torch.arange(keys - new, keys)[:, None] - torch.arange(keys)
        bias = -0.3 * distance.double()
        return bias.masked_fill(distance < 0, -torch.inf)


class Decode(nn.Module):
    """Causal attention over the tokens and attention over the source."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.cross = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def extend(self, cache: dict[str, Any], h: Tensor, bias: Tensor, source: Tensor) -> Tensor:
        q, k, v = self.project(h).chunk(3, dim=-1)
        if "k" in cache:
            k, v = torch.cat([cache["k"], k], dim=1), torch.cat([cache["v"], v], dim=1)
        cache["k"], cache["v"] = k, v
        h = h + (q @ k.mT / D**0.5 + bias).softmax(-1) @ v
        return h + (self.cross(h) @ source.mT).softmax(-1) @ source

    def forward(self, h: Tensor, bias: Tensor, source: Tensor) -> Tensor:
        return self.extend({}, h, bias, source)


class Shift(nn.Module):
    """Looks at the position before, and has no ``extend``: what a cache would get wrong."""

    def forward(self, h: Tensor) -> Tensor:
        return h + nn.functional.pad(h, (0, 0, 1, 0))[:, :-1]


def causal_program(*, layers: int = 2, shift: bool = False) -> BlockProgram:
    torch.manual_seed(19)  # answers of 2, 5 and 5 tokens
    decoders = [Block(f"decode.{i}", Decode(), ("h", "bias", "source_h"), ("h",)) for i in range(layers)]
    program = BlockProgram(
        [
            Block("encode", Encode(), ("source",), ("source_h",)),
            Block("positions", Positions(), ("tokens", "length"), ("bias",), recomputable=True),
            Block("embed", nn.Embedding(V, D), ("tokens",), ("h",)),
            *([Block("shift", Shift(), ("h",), ("h",))] if shift else []),
            *decoders,
            Block("head", nn.Linear(D, V), ("h",), ("logits",)),
        ],
        inputs=("source", "tokens", "length"),
        outputs=("logits",),
        axes={"bias": None, "length": None},
    )
    for parameter in program.parameters():  # large, so that the likeliest token is seldom a close call
        parameter.data.mul_(2.0)
    return program.double().eval()


def source_batch(rows: int = 3) -> dict[str, Tensor]:
    return {"source": torch.randint(0, V, (rows, 4), generator=torch.Generator().manual_seed(5))}


def next_inputs(tokens: Tensor, past: int) -> dict[str, Tensor]:
    """The new tokens, and one entry a position (cached ones too)."""
    return {"tokens": tokens[:, past:], "length": torch.zeros(tokens.shape[1])}


def log_likelihood(program: BlockProgram, source: Tensor, prompt: list[int], answer: list[int]) -> float:
    """log p(answer | source, prompt) by one plain run."""
    tokens = torch.tensor([prompt + answer])
    env = {"source": source[None], **next_inputs(tokens[:, :-1], 0)}
    with torch.no_grad():
        log_p = program.run(env)["logits"][0].log_softmax(-1)
    start = len(prompt) - 1
    return sum(log_p[start + i, t].item() for i, t in enumerate(answer))
