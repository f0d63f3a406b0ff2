"""Greedy decoding with the reader's own blocks, on one process.

The context is encoded, and its keys and values projected, once; the decoder then runs over the growing answer.
Answers are a line long, so the prefix itself is decoded anew for each token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline import BlockProgram
from rag_mm.reader.embedding import AnswerEmbedding
from rag_mm.reader.head import LossHead
from rag_mm.reader.layers import DecoderLayer, fuse


@torch.no_grad()
def greedy(program: BlockProgram, context: dict[str, Tensor], *, bos: int, end: int, max_tokens: int) -> Tensor:
    """Answer tokens (B, <= max_tokens), ``end`` included and repeated after it.

    Args:
        context: ``Collator.context``'s tensors and ``query_embedding`` (B, E), ``document_embedding`` (P, E).
    """
    blocks = {block.name: block.module for block in program.blocks}
    head, tokens = blocks["head"], blocks["answer"]
    assert isinstance(head, LossHead) and isinstance(tokens, AnswerEmbedding)
    decoder = [module for module in blocks.values() if isinstance(module, DecoderLayer)]
    encoded = program.run(context, 0, program.index("answer"))["context"]
    rows, length = context["question"].shape[0], encoded.shape[1]
    fused, mask = fuse(encoded, rows), fuse(context["context_mask"], rows)
    token = fuse(context["context_token"], rows)
    prior = head.prior(head.scores(context["query_embedding"], context["document_embedding"]), length)
    contexts = [layer.cross_attention.project(fused) for layer in decoder]
    keys = head.pointer.keys(fused)
    answer = torch.full((rows, 1), bos, dtype=torch.int64)
    done = torch.zeros(rows, dtype=torch.bool)
    for _ in range(max_tokens):
        h = tokens.tokens(answer)
        for layer, context_kv in zip(decoder, contexts, strict=True):
            h = layer.stream(h, context_kv, mask, dropout=False)
        parts = head.pointer.parts(h[:, -1:], keys, mask, token, answer, prior)
        last = head.pointer.distribution(parts, token)[:, -1]
        following = torch.where(done, end, last.argmax(-1))
        answer = torch.cat([answer, following.unsqueeze(1)], dim=1)
        done |= following == end
        if done.all():
            break
    return answer[:, 1:]
