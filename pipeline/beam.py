"""Which tokens come next: greedy, or the best of several hypotheses.

Beam search over sums of log-probabilities. A hypothesis that takes the end token is finished and counts
``score / tokens ** length_penalty``; a sample is done when no unfinished hypothesis can overtake its
``width`` best finished ones, whatever may follow. With one beam this is greedy search. Of equally likely tokens the
one with the smallest id comes first, and of equal hypotheses the one that was there first: a tie is no draw.

Shapes: B samples, W beams, R = B * W rows (R = B before the first choice), V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class _Hypothesis:
    tokens: list[int]
    score: float
    value: float


class Beams:
    """The hypotheses of a batch. ``start``, then ``choose`` for each token, then ``result``.

    Args:
        end: token that finishes a hypothesis.
        width: W.
        length_penalty: power of the length that a finished hypothesis' score is divided by; above 0 favours long
            ones, since scores are negative.
    """

    def __init__(self, *, end: int, width: int = 1, length_penalty: float = 1.0) -> None:
        self.end, self.width, self.length_penalty = end, width, length_penalty

    def start(self, num_samples: int, *, max_tokens: int) -> None:
        """Forget everything; one empty hypothesis a sample, of at most ``max_tokens`` tokens."""
        self._max_tokens, self._done = max_tokens, [False] * num_samples
        self._live: list[list[_Hypothesis]] = [[_Hypothesis([], 0.0, 0.0)] for _ in range(num_samples)]
        self._finished: list[list[_Hypothesis]] = [[] for _ in range(num_samples)]

    def _value(self, score: float, length: int) -> float:
        return score / length**self.length_penalty

    def choose(self, log_p_RV: Tensor) -> dict[str, Tensor]:
        """Extend every hypothesis by a token. What is unfinished after ``max_tokens`` counts as it stands.

        Args:
            log_p_RV: log-probabilities of the next token, for the rows given last time (B at the beginning).

        Returns:
            ``token`` and ``parent`` (B * W,): the new rows' tokens and the rows they continue; ``going_on`` (1,)
            is 0 when every sample is done.
        """
        live = [h for sample in self._live for h in sample]
        assert log_p_RV.shape[0] == len(live), f"{log_p_RV.shape[0]} rows for {len(live)} hypotheses"
        # Ends and W that go on: each hypothesis can give one end, so W + 1 candidates of a row are enough.
        top = min(log_p_RV.shape[1], self.width + 1)
        log_p, tokens = likeliest(log_p_RV.cpu(), top)
        token, parent, row = [], [], 0
        for b, hypotheses in enumerate(self._live):
            candidates: list[tuple[float, int, int, _Hypothesis]] = []
            for h in hypotheses:
                for p, t in zip(log_p[row].tolist(), tokens[row].tolist(), strict=True):
                    candidates.append((h.score + p, t, row, h))
                row += 1
            candidates.sort(key=lambda c: -c[0])
            self._live[b] = []
            last = len(hypotheses[0].tokens) + 1 == self._max_tokens
            for rank, (score, t, origin, h) in enumerate(candidates):
                length = len(h.tokens) + 1
                made = _Hypothesis([*h.tokens, t], score, self._value(score, length))
                if t == self.end or self._done[b]:
                    if rank < self.width:
                        self._finish(b, made)
                elif len(self._live[b]) < self.width and score > -math.inf:
                    self._live[b].append(made)
                    token.append(t)
                    parent.append(origin)
            while len(self._live[b]) < self.width:  # fewer words than beams: a row that cannot win
                self._live[b].append(_Hypothesis([self.end], -math.inf, -math.inf))
                token.append(self.end)
                parent.append(candidates[0][2])
            for h in self._live[b] if last else ():
                self._finish(b, h)
            self._done[b] = self._done[b] or last or self._is_done(b)
        return {
            "token": torch.tensor(token, device=log_p_RV.device),
            "parent": torch.tensor(parent, device=log_p_RV.device),
            "going_on": torch.tensor([int(not all(self._done))], device=log_p_RV.device),
        }

    def _finish(self, b: int, made: _Hypothesis) -> None:
        if self._done[b] or made.score == -math.inf:
            return
        kept = sorted([*self._finished[b], made], key=lambda h: -h.value)
        self._finished[b] = kept[: self.width]

    def _is_done(self, b: int) -> bool:
        best = max(h.score for h in self._live[b])
        if len(self._finished[b]) < self.width:
            return best == -math.inf
        if self.width == 1:
            return True
        # Scores only fall. Where length is rewarded, the best that may come is as long as can be.
        length = self._max_tokens if self.length_penalty > 0 else len(self._live[b][0].tokens) + 1
        return self._finished[b][-1].value >= self._value(best, length)

    def result(self) -> dict[str, Tensor]:
        """The best hypothesis of every sample: ``tokens`` (B, T), padded with ``end``, and ``score`` (B,)."""
        best = [finished[0] for finished in self._finished]
        width = max(len(h.tokens) for h in best)
        tokens = torch.tensor([h.tokens + [self.end] * (width - len(h.tokens)) for h in best])
        return {"tokens": tokens, "score": torch.tensor([h.score for h in best], dtype=torch.float64)}


def likeliest(log_p_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of every row, largest first, and where they are; ties go to the smallest index.

    ``topk`` says nothing of ties, so rows that have one at the edge are sorted whole.
    """
    best, index = log_p_RV.topk(count, dim=1)
    tied = (log_p_RV >= best[:, -1:]).sum(1) > count
    if bool(tied.any()):
        ordered, places = log_p_RV[tied].sort(dim=1, descending=True, stable=True)
        best[tied], index[tied] = ordered[:, :count], places[:, :count]
    by_index = index.sort(dim=1)
    values, order = best.gather(1, by_index.indices).sort(dim=1, descending=True, stable=True)
    return values, by_index.values.gather(1, order)
