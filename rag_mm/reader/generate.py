"""Answers from an answering program over its stages: the likeliest tokens, or the likeliest of given answers.

Batches are ``Collator.context``'s tensors with ``query_embedding`` (B, E) and ``document_embedding`` (P, E); every rank
of the pipeline gives the same batch (or at least the inputs that its stages read) and gets the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pipeline import Pipeline
from pipeline.adapters import answer_inputs
from pipeline.generate import NextInputs, generate


def decode(
    reader: Pipeline,
    context: Mapping[str, Tensor],
    *,
    num_samples: int,
    bos: int,
    end: int,
    max_tokens: int,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    cache: bool = True,
) -> Tensor:
    """Answer tokens (B, <= max_tokens), ``end`` included and repeated after it.

    Args:
        reader: over `rag_mm.reader.fusion.answering_program`.
        num_beams: 1 is greedy.
        length_penalty: of beams (`pipeline.generate`).
        cache: without it every token reads everything again: the slow, obvious twin.
    """
    prompt = torch.full((num_samples, 1), bos, dtype=torch.int64, device=reader.device)
    found = generate(
        reader, context, prompt=prompt, next_inputs=next_inputs(reader), end=end, max_tokens=max_tokens,
        num_beams=num_beams, length_penalty=length_penalty, cache=cache,
    )  # fmt: skip
    return found.tokens


def next_inputs(reader: Pipeline) -> NextInputs:
    """The answer tokens that are not in the caches yet, for `pipeline.generate` and `pipeline.score`."""
    if "answer_mask" in reader.program.inputs:
        return answer_inputs
    return lambda tokens, past: {"answer_in": tokens[:, past:]}
