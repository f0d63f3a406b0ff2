"""Greedy decoding with the reader's own blocks, on one process.

The context is read, and its keys and values projected, once; the answer's own places are computed anew for each
token, because answers are a line long.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline import BlockProgram
from rag_mm.reader.fusion import decoding


@torch.no_grad()
def greedy(program: BlockProgram, context: dict[str, Tensor], *, bos: int, end: int, max_tokens: int) -> Tensor:
    """Answer tokens (B, <= max_tokens), ``end`` included and repeated after it.

    Args:
        context: ``Collator.context``'s tensors and ``query_embedding`` (B, E), ``document_embedding`` (P, E).
    """
    read, rows = decoding(program, context), context["question"].shape[0]
    answer = torch.full((rows, 1), bos, dtype=torch.int64)
    done = torch.zeros(rows, dtype=torch.bool)
    for _ in range(max_tokens):
        following = torch.where(done, end, read.following(answer).argmax(-1))
        answer = torch.cat([answer, following.unsqueeze(1)], dim=1)
        done |= following == end
        if done.all():
            break
    return answer[:, 1:]
