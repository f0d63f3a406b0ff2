"""What one gets without learning: the commonest answer, the most similar pixels, and what shares rare words."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from data.dataset import Dataset, Sample
from data.images import pixels as pixel_features
from rag_mm.evaluate.answer import DEPTH, Prediction
from retriever.bm25 import Bm25


def most_frequent(dataset: Dataset, samples: Sequence[Sample]) -> list[Prediction]:
    """For every question the first answer that is commonest among the training questions of its field.

    Ties go to the answer that sorts first; a field that training never asked for is answered with nothing.
    """
    count: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for sample in dataset.questions("train"):
        if sample.weight:
            count[sample.field][sample.answers[0]] += 1
    best = {field: min(answers, key=lambda a: (-answers[a], a)) for field, answers in count.items()}
    return [Prediction(sample.id, best.get(sample.field, "")) for sample in samples]


def pixels(dataset: Dataset, samples: Sequence[Sample], *, depth: int = DEPTH) -> list[Prediction]:
    """Retrieval only: documents by the similarity of 12 x 12 mean-centred pixels, ties broken by id.

    Questions without a picture get no documents.
    """
    asked = [sample for sample in samples if sample.image is not None]
    found: dict[str, Prediction] = {}
    if asked:
        documents = [d for d in dataset.store.fetch(sorted(dataset.store.ids)) if d.image is not None]
        memory = pixel_features([d.image for d in documents if d.image is not None])
        query = pixel_features([s.image for s in asked if s.image is not None])
        score, row = (query @ memory.T).sort(dim=1, descending=True, stable=True)
        for sample, scores, rows in zip(asked, score[:, :depth].tolist(), row[:, :depth].tolist(), strict=True):
            ids = tuple(documents[i].id for i in rows)
            found[sample.id] = Prediction(sample.id, None, ids, tuple(scores))
    return [found.get(sample.id, Prediction(sample.id, None)) for sample in samples]


def bm25(dataset: Dataset, samples: Sequence[Sample], *, depth: int = DEPTH) -> list[Prediction]:
    """Retrieval only: documents by BM25 of the question's words with their texts (`retriever.bm25`).

    A picture is not looked at: of picture questions only what their words find.
    """
    index = Bm25(dataset.store)
    ids, scores = index.search([sample.question for sample in samples], k=min(depth, len(index.ids)))
    return [Prediction(s.id, None, tuple(i), tuple(v)) for s, i, v in zip(samples, ids, scores, strict=True)]
