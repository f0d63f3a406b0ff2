"""How likely given continuations are, over the stages of a program: ranking answers instead of writing one.

What depends on no token runs once for a sample, and so does its prompt; each of its continuations then goes on from
there (`pipeline.decoding`), all its tokens at once. Nothing feeds back, so stages work on different samples at the
same time. Cost: one pass of the moving blocks over all tokens of all continuations.

Shapes: B samples, C continuations of one of them, L tokens of the longest, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pipeline import keyed
from pipeline.decoding import Decoding, NextInputs
from pipeline.generate import NAN
from pipeline.runtime import Pipeline


def score(
    pipeline: Pipeline,
    batch: Mapping[str, Tensor],
    *,
    prompt: Tensor,
    continuations: Sequence[Sequence[Sequence[int]]],
    next_inputs: NextInputs,
    logits: str = "logits",
    rows_at_once: int = 256,
) -> list[Tensor]:
    """Log-likelihood of each continuation of each sample, the same on every rank of the pipeline.

    Args:
        pipeline: over a program that leaves ``logits``; call ``program.eval()`` before. All its ranks call this.
        batch: batch inputs that do not depend on the tokens (at least those that this rank reads).
        prompt: (B, T) token ids that they continue, the same on every rank; at least one a sample.
        continuations: by sample, token ids of each of its continuations; at least one token.
        next_inputs, logits: as for `pipeline.generate.generate`.
        rows_at_once: continuations computed at a time.

    Returns:
        By sample (C,) float64: the sum of the tokens' log-probabilities (nats), given the prompt and those before.

    Raises:
        ValueError: for a wrong argument, on every rank; for a block that looks at other positions and has no
            ``extend``; if the model gives NaN.
    """
    _check(prompt, continuations, rows_at_once)
    with torch.no_grad(), pipeline.watched(), keyed.scope(seed=0, step=0):
        decoding = Decoding(pipeline, batch, next_inputs, logits=logits, cache=True)
        first = decoding.next_scores(prompt, 0)
        log_p_BV = None if first is None else first[:, -1].double().log_softmax(-1)
        after_prompt = decoding.stages
        sums: list[Tensor] = []
        for b, own in enumerate(continuations):
            for start in range(0, len(own), rows_at_once):
                decoding.stages = {s: kept.copied() for s, kept in after_prompt.items()}
                token_CL, is_token_CL = _padded(own[start : start + rows_at_once], device=prompt.device)
                parent = torch.full((token_CL.shape[0],), b, device=prompt.device)
                decoding.reorder(parent, rows=prompt.shape[0])
                rest = None
                if token_CL.shape[1] > 1:
                    rest = decoding.next_scores(torch.cat([prompt[parent], token_CL[:, :-1]], 1), prompt.shape[1])
                if log_p_BV is not None:
                    sums.append(_sums(log_p_BV[parent], rest, token_CL, is_token_CL))
        decoding.outbox.wait()
        flat = decoding.from_last_rank({"sum": torch.cat(sums)} if sums else None, ("sum",))["sum"]
    if bool(flat.isnan().any()):
        raise ValueError(NAN)
    return list(flat.split([len(own) for own in continuations]))


def _check(prompt: Tensor, continuations: Sequence[Sequence[Sequence[int]]], rows_at_once: int) -> None:
    if prompt.dim() != 2 or not prompt.shape[1]:
        raise ValueError(f"prompt has shape {tuple(prompt.shape)}; it must be (samples, at least 1 token)")
    if len(continuations) != prompt.shape[0]:
        raise ValueError(f"there are continuations of {len(continuations)} samples and prompts of {prompt.shape[0]}")
    for b, own in enumerate(continuations):
        if not own or not all(len(tokens) for tokens in own):
            raise ValueError(f"sample {b} has no continuation, or one without tokens; give at least one token")
    if rows_at_once < 1:
        raise ValueError(f"rows_at_once is {rows_at_once}; it must be at least 1")


def _padded(rows: Sequence[Sequence[int]], *, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens (C, L), filled up with the first one's, and which are there. What is filled comes last: none sees it."""
    length = max(map(len, rows))
    tokens = torch.tensor([[*row, *[row[0]] * (length - len(row))] for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return tokens, torch.arange(length, device=device) < lengths[:, None]


def _sums(log_p_CV: Tensor, rest_CLV: Tensor | None, token_CL: Tensor, is_token_CL: Tensor) -> Tensor:
    """(C,) from the log-probabilities of the first token and the logits of those after it."""
    log_p_CL = log_p_CV.gather(1, token_CL[:, :1])
    if rest_CLV is not None:
        rest = rest_CLV.double().log_softmax(-1).gather(2, token_CL[:, 1:, None]).squeeze(2)
        log_p_CL = torch.cat([log_p_CL, rest], dim=1)
    return log_p_CL.masked_fill(~is_token_CL, 0.0).sum(1)
