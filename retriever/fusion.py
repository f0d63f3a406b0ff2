"""One embedding out of a text part and a picture part, either of which may be missing.

- `Blocks`: side by side, so the inner product of two embeddings is ``text.text + picture.picture``. A part that one of
  the two lacks contributes exactly nothing. Text is never compared with pictures, so neither finds the other.
- `Mean`: one space, the parts that are there averaged. A name finds its picture; a row with both parts shows half of
  each, which costs where one part alone tells the answer.
- `Learned`: the mean plus a small network of both parts and of what is missing, which starts at zero. It learns when
  to trust which part, and needs examples to do so.

Shapes: N rows, E_p width of a part, E width of the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PARTS = ("text", "image")
Part = tuple[Tensor, Tensor]  # vectors (N, E_p), and which rows have that part (N,)


class Fusion(nn.Module):
    """Parts to embeddings.

    Attributes:
        dim: E.
        parts: names of the parts that there are, in order.
    """

    dim: int

    def __init__(self, dims: Mapping[str, int]) -> None:
        super().__init__()
        self.parts = tuple(name for name in PARTS if name in dims)

    def forward(self, parts: Sequence[Part], weight: Tensor) -> Tensor:
        """Embeddings (N, E).

        Args:
            parts: in the order of ``self.parts``.
            weight: (2,) of text and picture.
        """
        raise NotImplementedError

    def _weighted(self, parts: Sequence[Part], weight: Tensor) -> list[Tensor]:
        """The parts, nothing where there are none."""
        return [
            part * has.unsqueeze(1) * weight[PARTS.index(name)]
            for name, (part, has) in zip(self.parts, parts, strict=True)
        ]


class Blocks(Fusion):
    """Side by side."""

    def __init__(self, dims: Mapping[str, int]) -> None:
        super().__init__(dims)
        self.dim = sum(dims[name] for name in self.parts)

    def forward(self, parts: Sequence[Part], weight: Tensor) -> Tensor:
        return torch.cat(self._weighted(parts, weight), dim=1)


class Mean(Fusion):
    """The average of the parts that are there, each in the shared space.

    Args:
        shared_dim: width of that space, which a linear map brings each part to; 0: the parts' own, with no maps.

    Raises:
        ValueError: without ``shared_dim``, if the parts' widths differ.
    """

    def __init__(self, dims: Mapping[str, int], *, shared_dim: int, fusion: str = "mean") -> None:
        super().__init__(dims)
        widths = [dims[name] for name in self.parts]
        if not shared_dim and len(set(widths)) > 1:
            given = ", ".join(f"{name} {dims[name]}" for name in self.parts)
            raise ValueError(
                f"retriever.fusion is {fusion!r}, which needs parts of one width, but they are: {given}. Set "
                "retriever.shared_dim (a linear map brings each part to it), or make the widths equal"
            )
        self.dim = shared_dim or widths[0]
        self.project = nn.ModuleDict(
            {name: nn.Linear(dims[name], shared_dim, bias=False) for name in self.parts} if shared_dim else {}
        )

    def forward(self, parts: Sequence[Part], weight: Tensor) -> Tensor:
        return self._mean([has for _, has in parts], self._weighted(self._projected(parts), weight))

    def _projected(self, parts: Sequence[Part]) -> list[Part]:
        if not self.project:
            return list(parts)
        return [(self.project[name](part), has) for name, (part, has) in zip(self.parts, parts, strict=True)]

    @staticmethod
    def _mean(has: Sequence[Tensor], weighted: Sequence[Tensor]) -> Tensor:
        count_N = torch.stack([one.to(weighted[0].dtype) for one in has]).sum(0)
        return torch.stack(list(weighted)).sum(0) / count_N.clamp(min=1.0).unsqueeze(1)


class Learned(Mean):
    """The mean, and a network of two layers over the parts and of which are there; its last layer starts at zero."""

    def __init__(self, dims: Mapping[str, int], *, shared_dim: int) -> None:
        super().__init__(dims, shared_dim=shared_dim, fusion="learned")
        self.hidden = nn.Linear(len(self.parts) * (self.dim + 1), 2 * self.dim)
        self.out = nn.Linear(2 * self.dim, self.dim)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, parts: Sequence[Part], weight: Tensor) -> Tensor:
        weighted = self._weighted(self._projected(parts), weight)
        has_NP = torch.stack([has.to(weighted[0].dtype) for _, has in parts], dim=1)
        seen = self.out(F.gelu(self.hidden(torch.cat([*weighted, has_NP], dim=1))))
        anything_N1 = has_NP.amax(1, keepdim=True)
        return self._mean([has for _, has in parts], weighted) + seen * anything_N1


def make_fusion(kind: Literal["blocks", "mean", "learned"], dims: Mapping[str, int], *, shared_dim: int) -> Fusion:
    """The fusion that ``retriever.fusion`` names, for parts of these widths."""
    if kind == "blocks":
        return Blocks(dims)
    return Mean(dims, shared_dim=shared_dim) if kind == "mean" else Learned(dims, shared_dim=shared_dim)
