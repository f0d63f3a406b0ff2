"""The end of every reader: answer likelihoods, every objective that is a sum over samples, and the next token.

A reader's last block says what was read (`Reading`: all documents at once, and each by itself) and this module
does the rest, the same for every fusion.

Shapes: B samples, k documents each, P = B*k pairs, N rows (B or P), J context positions of a row, T answer
tokens, V vocabulary, E embedding width, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rag_mm import losses
from rag_mm.objectives import ALONE, MARGINAL, ObjectivesConfig
from rag_mm.reader.config import ReaderConfig
from rag_mm.reader.embedding import TokenEmbedding
from rag_mm.reader.layers import fuse
from rag_mm.reader.pointer import PointerHead
from rag_mm.reader.score_losses import Worth, score_losses
from rag_mm.reader.side_streams import SideStreams


@dataclass(frozen=True)
class Reading:
    """Answer states (N, T, D) and what they may copy from: states (N, J, D), mask, tokens and log-prior (N, J)."""

    answer_NTD: Tensor
    context_NJD: Tensor
    mask_NJ: Tensor
    token_NJ: Tensor
    prior_NJ: Tensor | None = None


@dataclass(frozen=True)
class Targets:
    """Tokens asked for, and weights that already divide by the global batch (`rag_mm.batch.Collator.answers`)."""

    answer_in_BT: Tensor
    target_BT: Tensor
    target_weight_BT: Tensor
    sample_weight_B: Tensor
    distill_weight_B: Tensor


# What the last block of every reader reads beside its streams, in the order of `Targets` and of the scores.
HEAD_INPUTS = (
    "answer_in", "target", "target_weight", "sample_weight", "distill_weight", "query_embedding", "document_embedding",
)  # fmt: skip


class Head(nn.Module):
    """Pointer and retriever scores: what training's and answering's last blocks share, parameters and all."""

    def __init__(self, pointer: PointerHead, log_prior_scale: nn.Parameter | None) -> None:
        super().__init__()
        self.pointer = pointer
        self.log_prior_scale = log_prior_scale

    def scores(self, query_BE: Tensor, document_PE: Tensor) -> Tensor:
        """Retriever scores (B, k) of the documents read."""
        return torch.einsum("be,bke->bk", query_BE, fuse(document_PE.unsqueeze(1), query_BE.shape[0]))

    def prior(self, score_Bk: Tensor, length: int) -> Tensor | None:
        """Log-probability of the document at every position (B, k*length) of the documents in a row, or None."""
        if self.log_prior_scale is None:
            return None
        return (score_Bk * self.log_prior_scale.exp()).log_softmax(1).repeat_interleave(length, dim=1)


class NextToken(Head):
    """Base of the last blocks that answer: ``logits`` (N, T, V), log-probabilities of the token after each of T.

    They are float64: the order of probabilities survives the logarithm.
    """

    def read(self, cache: dict[str, Any], reading: Reading) -> None:
        """Keep what answers may copy from; ``reading``'s answer states are not looked at."""
        cache["key"] = self.pointer.keys(reading.context_NJD)
        cache["mask"], cache["token"] = reading.mask_NJ, reading.token_NJ
        if reading.prior_NJ is not None:
            cache["prior"] = reading.prior_NJ

    def following(self, cache: dict[str, Any], answer_in_NT: Tensor, answer_NTD: Tensor) -> Tensor:
        """Log-probabilities (N, T, V) for T new answer tokens after those of earlier calls."""
        earlier = cache.get("answer_in")
        cache["answer_in"] = answer_in_NT if earlier is None else torch.cat([earlier, answer_in_NT], dim=1)
        token_NJ = cache["token"]
        parts = self.pointer.parts(
            answer_NTD, cache["key"], cache["mask"], token_NJ, cache["answer_in"], cache.get("prior")
        )
        return self.pointer.distribution(parts, token_NJ).double().log()


# What the last block of an answering program reads beside its streams and the context.
ANSWER_INPUTS = ("answer_in", "query_embedding", "document_embedding")


class LossHead(Head):
    """Base of the readers' last blocks in training.

    Their outputs are ``losses`` (B, objectives), weighted and divided by global denominators (the weights come with
    the batch), and ``statistics`` (B, columns of `statistic_names`) without graph.
    """

    def __init__(self, config: ReaderConfig, tokens: TokenEmbedding, objective: ObjectivesConfig) -> None:
        prior = nn.Parameter(torch.tensor(2.0)) if config.score_prior else None
        super().__init__(PointerHead(config, tokens), prior)
        self.objective, self.side = objective, SideStreams.of(objective)

    def prior(self, score_Bk: Tensor, length: int) -> Tensor | None:
        if self.objective.generation_trains == "reader":
            score_Bk = score_Bk.detach()
        return super().prior(score_Bk, length)

    def outputs(
        self,
        fused: Reading,
        alone: Sequence[Reading],
        targets: Targets,
        score_Bk: Tensor,
        *,
        width: int,
        without: Sequence[Reading] = (),
        attention_PT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``losses`` and ``statistics``.

        Args:
            fused: what was read of all documents.
            alone: of each document by itself (P rows), in every stream of single documents.
            score_Bk: inner products of embeddings.
            width: of an embedding.
            without: of all documents but the first, all but the second, and so on (B rows each), if asked for.
            attention_PT: to each document, of the first answer token or of all, a mean over layers, if asked for.
        """
        objective, target_BT, k = self.objective, targets.target_BT, score_Bk.shape[1]
        is_target_BT = targets.target_weight_BT > 0
        keys = self.pointer.keys(fused.context_NJD)
        parts = self._parts(fused, targets.answer_in_BT, keys)
        found = []
        if objective.generation > 0:
            log_p_BT = self.pointer.log_likelihood(parts, fused.token_NJ, target_BT)
            found.append(objective.generation * losses.generation(log_p_BT, targets.target_weight_BT))
        log_p_BkT = {}
        for name, trained, read in zip(objective.streams, objective.trained_streams, alone, strict=True):
            with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
                log_p_BkT[name] = self._alone(read, targets, is_target_BT, k=k)
        with torch.no_grad():
            rows = [self._log_p(read, targets, keys if read.context_NJD is fused.context_NJD else None)
                    for read in without]  # fmt: skip
            log_p_without_BkT = torch.stack(rows, dim=1) * is_target_BT.unsqueeze(1) if rows else None
        worth = Worth(log_p_BkT.get(ALONE), log_p_BkT.get(MARGINAL), log_p_without_BkT, attention_PT)
        by_score, seen = score_losses(
            objective, score_Bk, worth, width=width, target_weight_BT=targets.target_weight_BT,
            sample_weight_B=targets.sample_weight_B, distill_weight_B=targets.distill_weight_B,
        )  # fmt: skip
        found += by_score
        with torch.no_grad():
            right = self.pointer.distribution(parts, fused.token_NJ).argmax(-1) == target_BT
            entropy_B = losses.entropy(score_Bk.softmax(1))
            statistics = [is_target_BT.sum(1), (right & is_target_BT).sum(1), entropy_B, *seen]
        return torch.stack(found, dim=1), torch.stack([s.to(found[0].dtype) for s in statistics], dim=1)

    def _parts(
        self, read: Reading, answer_in_NT: Tensor, key_NJD: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys = self.pointer.keys(read.context_NJD) if key_NJD is None else key_NJD
        return self.pointer.parts(read.answer_NTD, keys, read.mask_NJ, read.token_NJ, answer_in_NT, read.prior_NJ)

    def _log_p(self, read: Reading, targets: Targets, key_BJD: Tensor | None) -> Tensor:
        """The answer's token log-likelihoods (B, T) of a reading with a row for each sample."""
        parts = self._parts(read, targets.answer_in_BT, key_BJD)
        return self.pointer.log_likelihood(parts, read.token_NJ, targets.target_BT)

    def _alone(self, alone: Reading, targets: Targets, is_target_BT: Tensor, *, k: int) -> Tensor:
        """The answer's token log-likelihoods given each document alone (B, k, T), 0 on padding."""
        answer_in_PT, target_PT, is_target_PT = (
            t.repeat_interleave(k, dim=0) for t in (targets.answer_in_BT, targets.target_BT, is_target_BT)
        )
        log_p_PT = self.pointer.log_likelihood(self._parts(alone, answer_in_PT), alone.token_NJ, target_PT)
        return (log_p_PT * is_target_PT).unflatten(0, (-1, k))
