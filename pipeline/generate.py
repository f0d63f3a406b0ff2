"""Generating tokens with a program that is cut into stages: greedy and beam search.

`pipeline.decoding` runs the stages; the rank of the last one tells the others which tokens come next.

Shapes: B samples, W beams, R = B * W rows, T tokens so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline import keyed
from pipeline.beam import Beams
from pipeline.decoding import Decoding, NextInputs
from pipeline.runtime import Pipeline


@dataclass(frozen=True)
class Generated:
    """What was generated, the same on every rank of the pipeline.

    Attributes:
        tokens: (B, <= max_tokens) without the prompt; ``end`` where a sample has ended before others.
        score: (B,) sum of log-probabilities of the tokens, ``end`` included.
    """

    tokens: Tensor
    score: Tensor


NAN = "the model gives NaN for the next token; look at its weights and inputs"


def generate(
    pipeline: Pipeline,
    batch: Mapping[str, Tensor],
    *,
    prompt: Tensor,
    next_inputs: NextInputs,
    end: int,
    max_tokens: int,
    logits: str = "logits",
    num_beams: int = 1,
    length_penalty: float = 1.0,
    cache: bool = True,
) -> Generated:
    """Continue each sample's prompt by the likeliest tokens.

    Args:
        pipeline: over a program that leaves ``logits``; call ``program.eval()`` before. All its ranks call this.
        batch: batch inputs that do not depend on the tokens (at least those that this rank reads).
        prompt: (B, T) token ids to start from, the same on every rank; at least one a sample.
        next_inputs: called with all tokens so far (R, T) and how many of them are in the caches already (0
            without ``cache``); gives the batch inputs that depend on them, for the other T - past positions.
        logits: output (R, T - past, V) that the next token is chosen by: logits or log-probabilities.
        end: token that ends a sample.
        num_beams: W; 1 is greedy.
        length_penalty: a finished hypothesis counts ``score / tokens ** length_penalty``.

    Raises:
        ValueError: for a wrong argument, or with ``cache`` for a block that looks at other positions and has no
            ``extend``.
    """
    if max_tokens < 1 or num_beams < 1:
        raise ValueError(f"max_tokens is {max_tokens} and num_beams {num_beams}; both must be at least 1")
    if prompt.dim() != 2 or not prompt.shape[1]:
        raise ValueError(f"prompt has shape {tuple(prompt.shape)}; it must be (samples, at least 1 token)")
    beams = Beams(end=end, width=num_beams, length_penalty=length_penalty)
    with torch.no_grad(), pipeline.watched(), keyed.scope(seed=0, step=0):
        decoding = Decoding(pipeline, batch, next_inputs, logits=logits, cache=cache)
        return _run(decoding, prompt, beams, max_tokens=max_tokens)


_NAN = -1  # instead of whether it goes on, so that every rank stops


def _run(decoding: Decoding, prompt: Tensor, beams: Beams, *, max_tokens: int) -> Generated:
    tokens, past, rows = prompt, 0, prompt.shape[0] * beams.width
    beams.start(prompt.shape[0], max_tokens=max_tokens)
    while True:
        scores = decoding.next_scores(tokens, past)
        chosen = None if scores is None else _choice(scores[:, -1].double().log_softmax(-1), beams, rows)
        # One message a token: the new rows' tokens, the rows they continue, whether it goes on.
        chosen = decoding.numbers_from_last_rank(chosen, 2 * rows + 1)
        token, parent, going_on = chosen[:rows], chosen[rows:-1], int(chosen[-1])
        past = tokens.shape[1]
        if going_on == _NAN:
            raise ValueError(NAN)
        if not going_on:
            break
        decoding.reorder(parent, rows=tokens.shape[0])
        tokens = torch.cat([tokens[parent], token[:, None]], dim=1)
    decoding.outbox.wait()
    done = beams.result() if decoding.pipeline.has_last_stage else None
    done = decoding.from_last_rank(done, ("tokens", "score"))
    return Generated(done["tokens"], done["score"])


def _choice(log_p_RV: Tensor, beams: Beams, rows: int) -> Tensor:
    if bool(log_p_RV.isnan().any()):
        return torch.full((2 * rows + 1,), _NAN, device=log_p_RV.device)
    chosen = beams.choose(log_p_RV)
    return torch.cat([chosen["token"], chosen["parent"], chosen["going_on"]])
