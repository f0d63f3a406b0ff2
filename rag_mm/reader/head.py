"""The last block: answer likelihoods, and every objective that is a sum over samples.

Shapes: B samples, k documents each, P = B*k pairs, L context tokens, T answer tokens, E embedding width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rag_mm import objectives
from rag_mm.objectives import ObjectivesConfig
from rag_mm.reader.config import ReaderConfig
from rag_mm.reader.embedding import TokenEmbedding
from rag_mm.reader.layers import fuse
from rag_mm.reader.pointer import PointerHead


class LossHead(nn.Module):
    """Block module: decoder streams, context and targets to loss contributions.

    Returns ``losses`` (B, objectives), weighted and divided by global denominators (the weights come with the
    batch), and ``statistics`` (B, 3) without graph: target tokens, those whose most likely token is right,
    and the entropy of the retriever's distribution over the k documents (nats).
    """

    def __init__(self, config: ReaderConfig, tokens: TokenEmbedding, objective: ObjectivesConfig) -> None:
        super().__init__()
        self.pointer = PointerHead(config, tokens)
        self.objective = objective
        self.log_prior_scale = nn.Parameter(torch.tensor(2.0)) if config.score_prior else None

    def scores(self, query_BE: Tensor, document_PE: Tensor) -> Tensor:
        """Retriever scores (B, k) of the documents read."""
        return torch.einsum("be,bke->bk", query_BE, fuse(document_PE.unsqueeze(1), query_BE.shape[0]))

    def prior(self, score_Bk: Tensor, length: int) -> Tensor | None:
        """Log-probability of the document at every fused context position (B, k*L), or None."""
        if self.log_prior_scale is None:
            return None
        return (score_Bk * self.log_prior_scale.exp()).log_softmax(1).repeat_interleave(length, dim=1)

    def forward(
        self,
        context_PLD: Tensor,
        mask_PL: Tensor,
        token_PL: Tensor,
        answer_in_BT: Tensor,
        target_BT: Tensor,
        target_weight_BT: Tensor,
        sample_weight_B: Tensor,
        query_BE: Tensor,
        document_PE: Tensor,
        answer_BTD: Tensor,
        alone_PTD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        rows, length = answer_in_BT.shape[0], mask_PL.shape[1]
        score_Bk = self.scores(query_BE, document_PE)
        token_BJ = fuse(token_PL, rows)
        parts = self.pointer.parts(
            answer_BTD,
            self.pointer.keys(fuse(context_PLD, rows)),
            fuse(mask_PL, rows),
            token_BJ,
            answer_in_BT,
            self.prior(score_Bk, length),
        )
        log_p_BT = self.pointer.log_likelihood(parts, token_BJ, target_BT)
        losses = [self.objective.generation * objectives.generation(log_p_BT, target_weight_BT)]
        is_target_BT = target_weight_BT > 0
        if alone_PTD is not None:
            with torch.no_grad():
                sum_Bk, mean_Bk = self._alone(
                    alone_PTD, context_PLD, mask_PL, token_PL, answer_in_BT, target_BT, is_target_BT
                )
            losses += self._distillation(score_Bk, sum_Bk, mean_Bk, sample_weight_B)
        with torch.no_grad():
            right = self.pointer.distribution(parts, token_BJ).argmax(-1) == target_BT
            p_Bk = score_Bk.softmax(1)
            entropy = -(p_Bk * p_Bk.clamp(min=1e-30).log()).sum(1)
            statistics = torch.stack([is_target_BT.sum(1), (right & is_target_BT).sum(1), entropy], dim=1)
        return torch.stack(losses, dim=1), statistics.to(losses[0].dtype)

    def _alone(
        self,
        alone_PTD: Tensor,
        context_PLD: Tensor,
        mask_PL: Tensor,
        token_PL: Tensor,
        answer_in_BT: Tensor,
        target_BT: Tensor,
        is_target_BT: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Sum and mean over tokens of the answer's log-likelihood given each document alone (B, k)."""
        k = mask_PL.shape[0] // answer_in_BT.shape[0]
        answer_in_PT, target_PT, is_target_PT = (
            t.repeat_interleave(k, dim=0) for t in (answer_in_BT, target_BT, is_target_BT)
        )
        keys = self.pointer.keys(context_PLD)
        parts = self.pointer.parts(alone_PTD, keys, mask_PL, token_PL, answer_in_PT, None)
        log_p_PT = self.pointer.log_likelihood(parts, token_PL, target_PT) * is_target_PT
        total = log_p_PT.sum(1)
        mean = total / is_target_PT.sum(1).clamp(min=1)
        return total.unflatten(0, (-1, k)), mean.unflatten(0, (-1, k))

    def _distillation(self, score_Bk: Tensor, sum_Bk: Tensor, mean_Bk: Tensor, weight_B: Tensor) -> list[Tensor]:
        o, losses = self.objective, []
        if o.pdist > 0:
            kl = objectives.pdist(
                score_Bk, mean_Bk, weight_B,
                score_temperature=o.pdist_score_temperature, target_temperature=o.pdist_target_temperature,
            )  # fmt: skip
            losses.append(o.pdist * kl)
        if o.emdr2 > 0:
            marginal = objectives.emdr2(score_Bk, sum_Bk, weight_B, score_temperature=o.emdr2_score_temperature)
            losses.append(o.emdr2 * marginal)
        return losses
