"""The pointer head: the next token is taken from the vocabulary or copied from the context.

``p(v) = g * softmax(vocabulary)[v] + (1 - g) * sum of pointer weights on context positions holding v``
(See et al., 1704.04368). A pointer weight's logit is a learned inner product, plus a learned bonus for
every token by which the answer so far matches what stands before the position (so a copy that has begun
goes on), plus, if asked, the retriever's log-probability of the document that the position belongs to.
The latter makes retrieval scores part of the generation loss, as REVEAL's attentive fusion does (2212.05221).

Shapes: N rows, T (or S) answer tokens, J context positions of a row (k*L fused, L for one document alone),
V vocabulary, D width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rag_mm.reader.config import ReaderConfig
from rag_mm.reader.embedding import TokenEmbedding

MATCH_LENGTHS = 3


class PointerHead(nn.Module):
    """Next-token distribution over vocabulary and context."""

    def __init__(self, config: ReaderConfig, tokens: TokenEmbedding) -> None:
        super().__init__()
        self.tokens = tokens
        self.norm, self.context_norm = nn.LayerNorm(config.width, bias=False), nn.LayerNorm(config.width, bias=False)
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.vocabulary = nn.Linear(config.width, config.width)
        self.gate = nn.Linear(config.width, 1)
        self.match = nn.Parameter(torch.ones(MATCH_LENGTHS))

    def keys(self, context_NJD: Tensor) -> Tensor:
        """What queries are compared with (N, J, D); a decoder can keep it between tokens."""
        return self.key(self.context_norm(context_NJD))

    def parts(
        self,
        answer_NTD: Tensor,
        key_NJD: Tensor,
        mask_NJ: Tensor,
        token_NJ: Tensor,
        answer_in_NS: Tensor,
        prior_NJ: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log gate (N, T, 2: vocabulary, pointer), log vocabulary (N, T, V) and log pointer (N, T, J).

        Args:
            answer_in_NS: the answer so far, of which the last T <= S positions are asked for.
        """
        h = self.norm(answer_NTD)
        asked, width = h.shape[1], h.shape[2]
        gate = self.gate(h)
        log_gate = torch.cat([F.logsigmoid(gate), F.logsigmoid(-gate)], dim=-1)
        log_vocabulary = (self.vocabulary(h) @ self.tokens.token.weight.T * width**-0.5).log_softmax(-1)
        scores = self.query(h) @ key_NJD.transpose(1, 2) * width**-0.5
        recent = answer_in_NS[:, -(asked + MATCH_LENGTHS - 1) :]
        scores = scores + self._match_bonus(token_NJ, recent)[:, -asked:]
        if prior_NJ is not None:
            scores = scores + prior_NJ.unsqueeze(1)
        log_pointer = scores.masked_fill(~mask_NJ.unsqueeze(1), -1e9).log_softmax(-1)
        return log_gate, log_vocabulary, log_pointer

    def _match_bonus(self, token_NJ: Tensor, answer_in_NT: Tensor) -> Tensor:
        bonus: Tensor | float = 0.0
        matched: Tensor | None = None
        for length in range(1, MATCH_LENGTHS + 1):
            before_NJ = F.pad(token_NJ, (length, 0), value=-1)[:, : token_NJ.shape[1]]
            last_NT = F.pad(answer_in_NT, (length - 1, 0), value=-2)[:, : answer_in_NT.shape[1]]
            same = before_NJ.unsqueeze(1) == last_NT.unsqueeze(2)
            matched = same if matched is None else matched & same
            bonus = bonus + matched.to(self.match.dtype) * self.match[length - 1]
        assert isinstance(bonus, Tensor)
        return bonus

    def log_likelihood(self, parts: tuple[Tensor, Tensor, Tensor], token_NJ: Tensor, target_NT: Tensor) -> Tensor:
        """``log p(target_t | ...)`` (N, T)."""
        log_gate, log_vocabulary, log_pointer = parts
        generated = log_vocabulary.gather(-1, target_NT.unsqueeze(-1)).squeeze(-1)
        here = token_NJ.unsqueeze(1) == target_NT.unsqueeze(2)
        copied = log_pointer.masked_fill(~here, -1e9).logsumexp(-1)
        return torch.logaddexp(log_gate[..., 0] + generated, log_gate[..., 1] + copied)

    def distribution(self, parts: tuple[Tensor, Tensor, Tensor], token_NJ: Tensor) -> Tensor:
        """``p(v | ...)`` (N, T, V)."""
        log_gate, log_vocabulary, log_pointer = parts
        p = (log_gate[..., :1] + log_vocabulary).exp()
        copy = (log_gate[..., 1:] + log_pointer).exp()
        return p.scatter_add(-1, token_NJ.unsqueeze(1).expand_as(copy), copy)
