"""Greedy decoding with the reader's own blocks, on one process.

The context is encoded once; the decoder then runs over the growing answer. Answers are a line long, so the
prefix is decoded anew for each token instead of keeping caches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline import BlockProgram
from rag_mm.reader.layers import fuse


@torch.no_grad()
def greedy(
    program: BlockProgram, context: dict[str, Tensor], *, bos: int, end: int, max_tokens: int
) -> Tensor:
    """Answer tokens (B, <= max_tokens), ``end`` included and repeated after it.

    Args:
        context: ``Collator.context``'s tensors and ``query_embedding`` (B, E), ``document_embedding`` (P, E).
    """
    blocks = {block.name: block.module for block in program.blocks}
    head = blocks["head"]
    rows = context["question"].shape[0]
    patches = blocks["vision"](context["question_image"], context["document_image"])
    x = blocks["embed"](context["question"], context["document"], *patches)
    for name, module in blocks.items():
        if name.startswith("encoder."):
            x = module(x, context["context_mask"])
    fused, mask = fuse(x, rows), fuse(context["context_mask"], rows)
    token = fuse(context["context_token"], rows)
    score = head.scores(context["query_embedding"], context["document_embedding"])
    prior = head.prior(score, x.shape[1])
    decoder = [module for name, module in blocks.items() if name.startswith("decoder.")]
    answer = torch.full((rows, 1), bos, dtype=torch.int64)
    done = torch.zeros(rows, dtype=torch.bool)
    for _ in range(max_tokens):
        h = blocks["answer"].tokens(answer)
        for module in decoder:
            h = module.stream(h, fused, mask, dropout=False)
        parts = head.pointer.parts(h, fused, mask, token, answer, prior)
        last = head.pointer.distribution(tuple(p[:, -1:] for p in parts), token)[:, -1]
        following = torch.where(done, end, last.argmax(-1))
        answer = torch.cat([answer, following.unsqueeze(1)], dim=1)
        done |= following == end
        if done.all():
            break
    return answer[:, 1:]
