"""What each document that was read had to do with the answer.

`log_likelihood` is what the reader gives to the very answer it gave, end included, when it reads that document alone:
``log p(answer | question, document)``, teacher-forced, in nats. This is the quantity that `emdr2` trains the
retriever on, and it is exact: one more pass with one document in the context instead of k. (A share of the attention
or of the copies in the fused pass would depend on what stands beside the document.) An answer is taken as its text is
tokenised.

`share` compares the documents of one question: their likelihoods over the sum of them, a posterior under equal
priors. It says which document carries the answer, not whether the answer is right; two that say the same share it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from data.dataset import Sample
from pipeline.score import score
from rag_mm.evaluate.answer import Answerer
from rag_mm.evaluate.prediction import Prediction
from rag_mm.reader.generate import next_inputs

NAME = "log p(answer | question, this document alone), nats"


@dataclass(frozen=True)
class Contribution:
    """Of one document to one answer (see the module)."""

    log_likelihood: float
    share: float


def contributions(
    answerer: Answerer, samples: Sequence[Sample], predictions: Sequence[Prediction]
) -> list[tuple[Contribution, ...]]:
    """By question, a contribution for each document that was read, in their order; on every rank, all of which call it.

    A question that was answered without documents has none.
    """
    pairs = [
        (sample, name, prediction.answer)
        for sample, prediction in zip(samples, predictions, strict=True)
        for name in prediction.document_ids[: prediction.num_read]
        if prediction.answer is not None
    ]
    sums: list[float] = []
    for start in range(0, len(pairs), answerer.batch_size):
        sums += _likelihoods(answerer, pairs[start : start + answerer.batch_size])
    found, place = [], 0
    for prediction in predictions:
        num = prediction.num_read if prediction.answer is not None else 0
        found.append(_shared(sums[place : place + num]))
        place += num
    return found


@torch.no_grad()
def _likelihoods(answerer: Answerer, pairs: Sequence[tuple[Sample, str, str]]) -> list[float]:
    collator, dim = answerer.collator, answerer.layout.encoder.dim
    documents = answerer.dataset.store.read([name for _, name, _ in pairs])
    context = collator.context(
        [sample.question for sample, _, _ in pairs],
        [[document] for document in documents],
        collator.images([sample.image for sample, _, _ in pairs]),
        collator.images([document.image for document in documents]),
    )
    # The retriever's distribution over one document is 1 whatever its score, so the embeddings do not matter.
    context["query_embedding"] = context["document_embedding"] = torch.zeros(len(pairs), dim)
    limit = answerer.config.data.max_answer_tokens
    answers = [collator.answer_ids(a)[:limit] for _, _, a in pairs]
    prompt = torch.full((len(pairs), 1), collator.bos, dtype=torch.int64)
    sums = score(
        answerer.layout.reader,
        context,
        prompt=prompt,
        next_inputs=next_inputs(answerer.layout.reader),
        continuations=[[a] for a in answers],
    )
    return [float(value) for value in sums]


def _shared(log_likelihoods: Sequence[float]) -> tuple[Contribution, ...]:
    if not log_likelihoods:
        return ()
    top = max(log_likelihoods)
    weights = [math.exp(value - top) for value in log_likelihoods]
    return tuple(Contribution(v, w / sum(weights)) for v, w in zip(log_likelihoods, weights, strict=True))
