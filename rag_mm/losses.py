"""The objectives as pure functions of numbers; every one gives each sample's contribution to a sum.

No function here divides by a batch: the caller passes weights that already hold one denominator counted
over the global batch, so micro-batches, padding (weight 0) and replicas change nothing. What each weight divides by is
in the docstrings; docs/objectives.md has the table. Nothing is averaged over the k documents either: a KL divergence
is a sum over them, so its scale does not depend on k.

Notation: B samples, k documents each, s_k their scores (what the score scale makes of inner products), T answer
tokens a_1..a_T, Q queries, U unique documents of the global batch. p(z_k|q) = softmax_k(s_k / score temperature).
"sg" stops gradients.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def generation(log_p_BT: Tensor, weight_BT: Tensor) -> Tensor:
    """``-sum_t w_t log p(a_t | a_<t, q, z_1..z_k)`` (B,); w is 0 on padding.

    Reduction: w divides by the global (weighted) target tokens; summed over samples, the mean over tokens.
    """
    return -(log_p_BT * weight_BT).sum(1)


def distillation(
    score_Bk: Tensor, worth_Bk: Tensor, weight_B: Tensor, *, score_temperature: float, target_temperature: float
) -> Tensor:
    """``w KL(sg softmax_k(l_k / target temperature) || softmax_k(s_k / score temperature))`` (B,).

    What `pdist`, `adist` and `loop` have in common; they differ in ``worth_Bk``, the l_k. Gradients reach the scores
    only.

    Reduction: summed over the k documents (not divided by k); w divides by the global (weighted) samples.
    """
    target = (worth_Bk.detach() / target_temperature).log_softmax(1)
    score = (score_Bk / score_temperature).log_softmax(1)
    return weight_B * (target.exp() * (target - score)).sum(1)


def token_mean(value_BkT: Tensor, is_target_BT: Tensor) -> Tensor:
    """Mean over a sample's target tokens (B, k); 0 for a sample that has none."""
    is_target_B1T = is_target_BT.unsqueeze(1)
    return (value_BkT * is_target_B1T).sum(2) / is_target_B1T.sum(2).clamp(min=1)


def pdist(log_p_BkT: Tensor, is_target_BT: Tensor) -> Tensor:
    """l_k (B, k) of `distillation` from each document alone [perplexity distillation, Atlas, 2208.03299].

    ``l_k = mean_t log p(a_t | a_<t, q, z_k)``.
    """
    return token_mean(log_p_BkT, is_target_BT)


def loop(log_p_BkT: Tensor, is_target_BT: Tensor) -> Tensor:
    """l_k (B, k) of `distillation` from all documents but one [leave one out, Atlas, 2208.03299].

    ``l_k = -mean_t log p(a_t | a_<t, q, z_1..z_k without z_k)``: a document without which the answer is unlikely is
    worth much.
    """
    return -token_mean(log_p_BkT, is_target_BT)


def adist(attention_BkT: Tensor, is_target_BT: Tensor) -> Tensor:
    """l_k (B, k) of `distillation` from the reader's attention to each document, a mean over layers and heads.

    Of the first answer token (B, k, 1): logits before the softmax, a mean over the document's tokens [FiD-KD,
    2012.04584]. Of all: weights after the softmax times lengths of values, summed over the document's tokens, whose
    mean over target tokens is taken here [Atlas, 2208.03299]. See `rag_mm.reader.document_attention`.
    """
    if attention_BkT.shape[2] == 1 and is_target_BT.shape[1] != 1:
        return attention_BkT.squeeze(2)
    return token_mean(attention_BkT, is_target_BT)


def emdr2(score_Bk: Tensor, sum_log_p_Bk: Tensor, weight_B: Tensor, *, score_temperature: float) -> Tensor:
    """``-w log sum_k p(z_k|q) sg[p(a|q, z_k)]`` (B,), of whole answers [EMDR2, 2106.05346].

    Reduction: ``sum_log_p_Bk`` sums over target tokens; w divides by the global (weighted) samples.
    """
    return rag_sequence(score_Bk, sum_log_p_Bk.detach(), weight_B, score_temperature=score_temperature)


def emdr2_token(score_Bk: Tensor, log_p_BkT: Tensor, weight_BT: Tensor, *, score_temperature: float) -> Tensor:
    """``-sum_t w_t log sum_k p(z_k|q) sg[p(a_t | a_<t, q, z_k)]`` (B,): EMDR2 as its published code reduces it.

    Reduction: w is 0 on padding and divides by the global (weighted) target tokens.
    """
    return rag_token(score_Bk, log_p_BkT.detach(), weight_BT, score_temperature=score_temperature)


def rag_sequence(score_Bk: Tensor, sum_log_p_Bk: Tensor, weight_B: Tensor, *, score_temperature: float) -> Tensor:
    """``-w log sum_k p(z_k|q) prod_t p(a_t | a_<t, q, z_k)`` (B,) [RAG-Sequence, 2005.11401].

    Gradients reach scores and likelihoods.

    Reduction: ``sum_log_p_Bk`` sums over target tokens; w divides by the global (weighted) samples, so the sum over
    samples is the mean negative marginal log-likelihood of an answer.
    """
    prior = (score_Bk / score_temperature).log_softmax(1)
    return -weight_B * (prior + sum_log_p_Bk).logsumexp(1)


def rag_token(score_Bk: Tensor, log_p_BkT: Tensor, weight_BT: Tensor, *, score_temperature: float) -> Tensor:
    """``-sum_t w_t log sum_k p(z_k|q) p(a_t | a_<t, q, z_k)`` (B,) [RAG-Token, 2005.11401].

    Gradients reach scores and likelihoods.

    Reduction: w is 0 on padding and divides by the global (weighted) target tokens, so the sum over samples is the
    mean negative marginal log-likelihood of a token.
    """
    prior = (score_Bk / score_temperature).log_softmax(1)
    return -((prior.unsqueeze(2) + log_p_BkT).logsumexp(1) * weight_BT).sum(1)


def contrastive(
    query_QE: Tensor,
    document_UE: Tensor,
    positive_QU: Tensor,
    weight_Q: Tensor,
    scale: Tensor,
    *,
    several: Literal["any", "each"] = "any",
) -> Tensor:
    """InfoNCE from queries to documents (Q,), over the unique documents of the global batch.

    ``any``: ``-w log (sum over positives of p(z|q))``, all positives are one event. ``each``: the mean over positives
    z of ``-w log(e^s_z / (e^s_z + sum over negatives e^s))``: every positive has to beat the negatives by itself, and
    the other positives are masked. Either way no positive is another's negative. One direction only: documents are
    not asked for their queries.

    Reduction: w divides by the queries of the global batch that have a positive; rows without one give 0, also where
    the batch has no document at all.

    Args:
        positive_QU: True where the document answers the query.
        scale: multiplies the inner products.
    """
    any_positive = positive_QU.any(1)
    if several == "any":
        log_p = (scale * query_QE @ document_UE.T).log_softmax(1)
        held = torch.where(any_positive.unsqueeze(1), positive_QU, True)
        # Filled in, not multiplied by 0: without any document there is nothing to sum, and its logarithm is -inf.
        log_right = log_p.masked_fill(~held, -torch.inf).logsumexp(1).masked_fill(~any_positive, 0.0)
        return -weight_Q * log_right
    score_QU = scale * query_QE @ document_UE.T
    # In place of -inf: a query all of whose documents are right has no negatives, and inf - inf would be its gradient.
    lowest = torch.finfo(score_QU.dtype).min
    negative_Q1 = score_QU.masked_fill(positive_QU, lowest).logsumexp(1, keepdim=True)
    loss_QU = (torch.logaddexp(score_QU, negative_Q1) - score_QU).masked_fill(~positive_QU, 0.0)
    return weight_Q * loss_QU.sum(1) / positive_QU.sum(1).clamp(min=1)


def entropy(p_Bk: Tensor) -> Tensor:
    """Of distributions (B,), in nats; 0 log 0 is 0."""
    return -(p_Bk * p_Bk.clamp(min=1e-30).log()).sum(1)


def posterior(score_Bk: Tensor, log_p_BkT: Tensor, is_target_BT: Tensor, *, score_temperature: float) -> Tensor:
    """p(z_k | q, a) (B, k): what the marginal objectives pull the scores towards.

    Proportional to ``p(z_k|q) p(a | q, z_k)``, a whole answer's likelihood also where the objective goes by tokens.
    """
    prior = (score_Bk / score_temperature).log_softmax(1)
    return (prior + (log_p_BkT * is_target_BT.unsqueeze(1)).sum(2)).softmax(1)


def contrastive_margin(query_QE: Tensor, document_UE: Tensor, positive_QU: Tensor) -> Tensor:
    """The best right inner product minus the best wrong one, of each query that has both (at most Q,)."""
    asking = positive_QU.any(1) & ~positive_QU.all(1)
    product, positive = (query_QE @ document_UE.T)[asking], positive_QU[asking]
    right, wrong = product.masked_fill(~positive, -torch.inf), product.masked_fill(positive, -torch.inf)
    if not product.shape[0]:
        return product.new_zeros(0)
    return right.amax(1) - wrong.amax(1)
