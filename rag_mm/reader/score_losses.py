"""The objectives that look at retriever scores, from what a reader found each document to be worth, and what they saw.

Each takes the inner products at its own scale and temperature and its target from its own stream (`Worth`). Beside its
loss, each leaves the entropies of the two distributions that it compares, by which a collapse shows: a target without
differences teaches nothing, scores that are all alike (or all on one document) no longer move.

Shapes: B samples, k documents each, T answer tokens, P = B*k pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rag_mm import losses
from rag_mm.objectives import DISTILLED, ObjectivesConfig


@dataclass(frozen=True)
class Worth:
    """What the reader says of documents; None where nobody asks.

    Attributes:
        alone_BkT: log p(a_t | a_<t, q, z_k), without graph, 0 on padding.
        marginal_BkT: the same with graph.
        without_BkT: log p(a_t | a_<t, q, all documents but z_k), without graph, 0 on padding.
        attention_PT: attention to a document, of the first answer token (P, 1) or of all.
    """

    alone_BkT: Tensor | None
    marginal_BkT: Tensor | None
    without_BkT: Tensor | None
    attention_PT: Tensor | None


def statistic_names(objective: ObjectivesConfig) -> tuple[str, ...]:
    """Columns of the reader's ``statistics``.

    Counts: target tokens, and those whose most likely token is right. ``entropy`` of the retriever's distribution over
    the k documents at temperature 1 (nats). The others are weighted by sample, so that they sum to a mean over the
    global batch: ``margin`` between the two best inner products, and for each objective the entropies of its target
    and of its distribution of scores.
    """
    of_objectives = [f"{name}/{what}" for name in objective.score_names for what in ("target", "score")]
    return ("tokens", "right", "entropy", "margin", *of_objectives)


def score_losses(
    objective: ObjectivesConfig,
    product_Bk: Tensor,
    worth: Worth,
    *,
    width: int,
    target_weight_BT: Tensor,
    sample_weight_B: Tensor,
    distill_weight_B: Tensor,
) -> tuple[list[Tensor], list[Tensor]]:
    """Losses (B,) of those objectives that are on, in the order of `READER_OBJECTIVES`, times their weights; and
    the statistics from ``margin`` on.

    Args:
        product_Bk: inner products of embeddings of this ``width``.
        target_weight_BT, sample_weight_B: divide by the global (weighted) target tokens and samples.
        distill_weight_B: as ``sample_weight_B``, or 0 while nothing may be learned from the reader yet.
    """
    found, seen = [], [sample_weight_B * _margin(product_Bk.detach())]
    for name in objective.score_names:
        score_Bk = product_Bk * objective.scale(name, width)
        if name.startswith("rag_") and getattr(objective, f"{name}_trains") == "reader":
            score_Bk = score_Bk.detach()
        temperature = objective.score_temperature(name)
        is_target_BT = target_weight_BT > 0
        if name in DISTILLED:
            worth_Bk, sharpness = _worth(name, worth, is_target_BT), objective.target_temperature(name)
            loss_B = losses.distillation(
                score_Bk, worth_Bk, distill_weight_B, score_temperature=temperature, target_temperature=sharpness
            )
            target_Bk = (worth_Bk / sharpness).softmax(1)
        else:
            log_p_BkT = worth.marginal_BkT if name.startswith("rag_") else worth.alone_BkT
            assert log_p_BkT is not None
            weights = {
                "emdr2": distill_weight_B,
                "emdr2_token": target_weight_BT * (distill_weight_B > 0).unsqueeze(1),
                "rag_sequence": sample_weight_B,
                "rag_token": target_weight_BT,
            }
            log_p = log_p_BkT if name.endswith("token") else log_p_BkT.sum(2)
            loss_B = getattr(losses, name)(score_Bk, log_p, weights[name], score_temperature=temperature)
            target_Bk = losses.posterior(
                score_Bk.detach(), log_p_BkT.detach(), is_target_BT, score_temperature=temperature
            )
        found.append(getattr(objective, name) * loss_B)
        with torch.no_grad():
            for p_Bk in (target_Bk, (score_Bk / temperature).softmax(1)):
                seen.append(sample_weight_B * losses.entropy(p_Bk))
    return found, seen


def _worth(name: str, worth: Worth, is_target_BT: Tensor) -> Tensor:
    """The l_k (B, k) of an objective."""
    if name == "pdist":
        assert worth.alone_BkT is not None
        return losses.pdist(worth.alone_BkT, is_target_BT)
    if name == "loop":
        assert worth.without_BkT is not None
        return losses.loop(worth.without_BkT, is_target_BT)
    assert worth.attention_PT is not None
    return losses.adist(worth.attention_PT.unflatten(0, (is_target_BT.shape[0], -1)), is_target_BT)


def _margin(product_Bk: Tensor) -> Tensor:
    """Between the two best (B,); 0 where there is one."""
    if product_Bk.shape[1] < 2:
        return product_Bk.new_zeros(product_Bk.shape[0])
    best_B2 = product_Bk.topk(2, dim=1).values
    return best_B2[:, 0] - best_B2[:, 1]
