"""Greedy decoding with the reader's own blocks, on one process.

The context is encoded once; the decoder then runs over the growing answer. Answers are a line long, so the
prefix is decoded anew for each token instead of keeping caches.
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
    answer = torch.full((rows, 1), bos, dtype=torch.int64)
    done = torch.zeros(rows, dtype=torch.bool)
    for _ in range(max_tokens):
        h = tokens.tokens(answer)
        for layer in decoder:
            h = layer.stream(h, fused, mask, dropout=False)
        gate, vocabulary, pointer = head.pointer.parts(h, fused, mask, token, answer, prior)
        last = head.pointer.distribution((gate[:, -1:], vocabulary[:, -1:], pointer[:, -1:]), token)[:, -1]
        following = torch.where(done, end, last.argmax(-1))
        answer = torch.cat([answer, following.unsqueeze(1)], dim=1)
        done |= following == end
        if done.all():
            break
    return answer[:, 1:]
