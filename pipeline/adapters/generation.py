"""Batch inputs that depend on the tokens so far, for `pipeline.generate.generate`.

B samples, R rows (B, or B * beams; those of a sample adjacent), P positions of the prompt, T tokens so far.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.generate import NextInputs


def causal_inputs(prompt_mask_BP: Tensor) -> NextInputs:
    """Inputs of a causal decoder built with ``positions=True``; prompts are padded on the left (mask 0).

    Raises:
        ValueError: if a prompt ends in padding.
    """

    if not bool(prompt_mask_BP[:, -1].all()):
        raise ValueError("a prompt ends in padding; pad prompts on the left, so that new tokens follow the last one")

    def next_inputs(tokens_RT: Tensor, past: int) -> dict[str, Tensor]:
        num_samples, prompt = prompt_mask_BP.shape
        seen = prompt_mask_BP.long().repeat_interleave(tokens_RT.shape[0] // num_samples, 0)
        new = torch.ones(tokens_RT.shape[0], tokens_RT.shape[1] - prompt, dtype=torch.long, device=seen.device)
        seen_RT = torch.cat([seen, new], 1)
        positions_RT = (seen_RT.cumsum(1) - 1).clamp(min=0)
        return {
            "input_ids": tokens_RT[:, past:],
            "attention_mask": seen_RT,
            "position_ids": positions_RT[:, past:],
        }

    return next_inputs


def answer_inputs(tokens_RT: Tensor, past: int) -> dict[str, Tensor]:
    """Inputs of a program with documents in front (`prepend_program`), built with ``answer_padding=True``.

    The prompt that `generate` is given is the answer's beginning, at least one token: documents and question are in the
    batch.
    """
    return {"answer_in": tokens_RT[:, past:], "answer_mask": torch.ones_like(tokens_RT)}


def decoder_inputs(tokens_RT: Tensor, past: int) -> dict[str, Tensor]:
    """Inputs of T5's decoder built with ``decoder_padding=True``."""
    return {"decoder_input_ids": tokens_RT[:, past:], "decoder_attention_mask": torch.ones_like(tokens_RT)}
