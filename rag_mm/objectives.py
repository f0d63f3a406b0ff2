"""What is minimised. Pure functions of numbers; every one is a sum over samples of contributions.

No function here divides by a batch: the caller passes weights that already hold one denominator counted
over the global batch, so micro-batches, padding (weight 0) and replicas change nothing.

Notation: B samples, k documents each, s_k their scores, l_k their answer likelihoods alone, T answer tokens,
Q queries, U unique documents of the global batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# Those computed in the reader, in the order of the columns of its ``losses``.
READER_OBJECTIVES = ("generation", "pdist", "emdr2", "rag_sequence", "rag_token")
# The reader's streams of single documents: without graph and dropout, and with both.
ALONE, MARGINAL = "alone", "marginal"


@dataclass(frozen=True)
class ObjectivesConfig:
    """Weights of the objectives (0: off) and their temperatures.

    Attributes:
        generation: cross entropy of the answer tokens; denominator: global target tokens.
        pdist: KL from document likelihoods to retriever scores (Atlas); denominator: global samples.
        pdist_score_temperature: divides the scores in pdist.
        pdist_target_temperature: divides the mean token log-likelihoods in pdist.
        emdr2: marginal likelihood of documents taken alone (EMDR2, per sequence); denominator: global samples.
        emdr2_score_temperature: divides the scores in emdr2.
        rag_sequence: marginal likelihood of whole answers over documents taken alone, which trains the reader too
            (RAG-Sequence); denominator: global samples. rag_sequence and rag_token read a stream of single documents
            with graph and dropout, which costs about what the fused stream costs for each document; pdist and emdr2
            read one without either. Where both kinds are asked for, both streams run.
        rag_sequence_score_temperature: divides the scores in rag_sequence.
        rag_token: the same marginal for every token by itself (RAG-Token); denominator: global target tokens.
        rag_token_score_temperature: divides the scores in rag_token.
        contrastive: InfoNCE of queries against the unique documents of the global batch, among them one hard negative
            of each query that has any; denominator: queries that have a positive.
        contrastive_on: which labels it sees: image-text pairs, question-document labels, or both.
    """

    generation: float = 1.0
    pdist: float = 0.5
    pdist_score_temperature: float = 0.1
    pdist_target_temperature: float = 0.5
    emdr2: float = 0.0
    emdr2_score_temperature: float = 0.1
    rag_sequence: float = 0.0
    rag_sequence_score_temperature: float = 1.0
    rag_token: float = 0.0
    rag_token_score_temperature: float = 1.0
    contrastive: float = 1.0
    contrastive_on: Literal["pairs", "questions", "both"] = "both"

    def __post_init__(self) -> None:
        for name in (*READER_OBJECTIVES, "contrastive"):
            if getattr(self, name) < 0:
                raise ValueError(f"objectives.{name} is {getattr(self, name)}; it must be 0 (off) or more")
        temperatures = [f"{name}_score_temperature" for name in READER_OBJECTIVES[1:]]
        for name in (*temperatures, "pdist_target_temperature"):
            if getattr(self, name) <= 0:
                raise ValueError(f"objectives.{name} is {getattr(self, name)}; it must be above 0")

    @property
    def reader_names(self) -> tuple[str, ...]:
        """Objectives computed in the reader, in the order of the columns of its ``losses``."""
        return tuple(name for name in READER_OBJECTIVES if getattr(self, name) > 0)

    @property
    def trains_reader(self) -> bool:
        """Whether an objective moves the reader's weights."""
        return self.generation > 0 or self.marginal

    @property
    def streams(self) -> tuple[str, ...]:
        """In which ways the reader answers from each document alone as well, of `ALONE` and `MARGINAL`."""
        alone = (ALONE,) if self.pdist > 0 or self.emdr2 > 0 else ()
        return (*alone, MARGINAL) if self.marginal else alone

    @property
    def trained_streams(self) -> tuple[bool, ...]:
        """For each of ``streams``, whether it has a graph and dropout."""
        return tuple(name == MARGINAL for name in self.streams)

    @property
    def marginal(self) -> bool:
        """Whether gradients reach the reader through what it says of single documents."""
        return self.rag_sequence > 0 or self.rag_token > 0


def generation(log_p_BT: Tensor, weight_BT: Tensor) -> Tensor:
    """``-sum_t w_t log p(a_t | a_<t, q, z_1..z_k)`` (B,); w is 0 on padding."""
    return -(log_p_BT * weight_BT).sum(1)


def pdist(
    score_Bk: Tensor,
    mean_log_p_Bk: Tensor,
    weight_B: Tensor,
    *,
    score_temperature: float,
    target_temperature: float,
) -> Tensor:
    """``w KL(softmax_k(l_k / t_target) || softmax_k(s_k / t_score))`` (B,) [Atlas, 2208.03299].

    The target carries no gradient; l_k is the mean over tokens of log p(a_t | a_<t, q, z_k).
    """
    target = (mean_log_p_Bk.detach() / target_temperature).log_softmax(1)
    score = (score_Bk / score_temperature).log_softmax(1)
    return weight_B * (target.exp() * (target - score)).sum(1)


def emdr2(score_Bk: Tensor, sum_log_p_Bk: Tensor, weight_B: Tensor, *, score_temperature: float) -> Tensor:
    """``-w log sum_k p(z_k|q) sg[p(a|q, z_k)]`` (B,), per sequence [EMDR2, 2106.05346]."""
    prior = (score_Bk / score_temperature).log_softmax(1)
    return -weight_B * (prior + sum_log_p_Bk.detach()).logsumexp(1)


def rag_sequence(score_Bk: Tensor, sum_log_p_Bk: Tensor, weight_B: Tensor, *, score_temperature: float) -> Tensor:
    """``-w log sum_k p(z_k|q) prod_t p(a_t | a_<t, q, z_k)`` (B,) [RAG-Sequence, 2005.11401].

    ``p(z_k|q) = softmax_k(s_k / temperature)``; ``sum_log_p_Bk`` sums ``log p(a_t | a_<t, q, z_k)`` over the target
    tokens of an answer. Gradients reach scores and likelihoods. w divides by the global (weighted) samples, so the
    sum over samples is the mean negative marginal log-likelihood of an answer.
    """
    prior = (score_Bk / score_temperature).log_softmax(1)
    return -weight_B * (prior + sum_log_p_Bk).logsumexp(1)


def rag_token(score_Bk: Tensor, log_p_BkT: Tensor, weight_BT: Tensor, *, score_temperature: float) -> Tensor:
    """``-sum_t w_t log sum_k p(z_k|q) p(a_t | a_<t, q, z_k)`` (B,) [RAG-Token, 2005.11401].

    Gradients reach scores and likelihoods. w is 0 on padding and divides by the global (weighted) target tokens, so
    the sum over samples is the mean negative marginal log-likelihood of a token.
    """
    prior = (score_Bk / score_temperature).log_softmax(1)
    return -((prior.unsqueeze(2) + log_p_BkT).logsumexp(1) * weight_BT).sum(1)


def contrastive(query_QE: Tensor, document_UE: Tensor, positive_QU: Tensor, weight_Q: Tensor, scale: Tensor) -> Tensor:
    """InfoNCE from queries to documents (Q,): ``-w log (sum over positives of p(z|q))``.

    Args:
        positive_QU: True where the document answers the query; all positives count as one event, so none
            is a false negative of another. Rows without a positive must have weight 0.
        scale: multiplies the inner products.
    """
    log_p = (scale * query_QE @ document_UE.T).log_softmax(1)
    any_positive = positive_QU.any(1)
    held = torch.where(any_positive.unsqueeze(1), positive_QU, True)
    return -weight_Q * any_positive * log_p.masked_fill(~held, -torch.inf).logsumexp(1)
