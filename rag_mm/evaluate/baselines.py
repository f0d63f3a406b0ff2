"""What one gets without learning: the commonest answer, the most similar pixels, and what shares rare words."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from data.dataset import Dataset, Sample
from data.images import ImageError
from data.images import pixels as pixel_features
from data.samples import forbidden_of
from rag_mm.evaluate.answer import DEPTH, Prediction
from rag_mm.evaluate.questions import words_of
from retriever.bm25 import Bm25

AT_ONCE = 1024  # questions or documents whose pictures are in memory together


def most_frequent(dataset: Dataset, samples: Sequence[Sample]) -> list[Prediction]:
    """For every question the first answer that is commonest among the training questions of its field.

    Ties go to the answer that sorts first; a field that training never asked for is answered with nothing.
    """
    count: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for sample in dataset.questions("train").scan():
        if sample.weight:
            count[sample.field][sample.answers[0]] += 1
    best = {field: min(answers, key=lambda a: (-answers[a], a)) for field, answers in count.items()}
    return [Prediction(sample.id, best.get(sample.field, "")) for sample in words_of(samples)]


def pixels(dataset: Dataset, samples: Sequence[Sample], *, depth: int = DEPTH) -> list[Prediction]:
    """Retrieval only: documents by the similarity of 12 x 12 mean-centred pixels, ties broken by id.

    Questions without a picture get no documents.
    """
    found: list[Prediction] = []
    memory: tuple[list[str], Tensor] | None = None
    for start in range(0, len(samples), AT_ONCE):
        window = samples[start : start + AT_ONCE]
        pictures = [sample.image for sample in window if sample.image is not None]
        ranked: Iterator[tuple[list[float], list[int]]] = iter(())
        if pictures:
            memory = memory or _document_pixels(dataset)
            score, row = (pixel_features(pictures) @ memory[1].T).sort(dim=1, descending=True, stable=True)
            wide = depth + max(len(sample.forbidden) for sample in window)
            ranked = zip(score[:, :wide].tolist(), row[:, :wide].tolist(), strict=True)
        for sample in window:
            if sample.image is None or memory is None:
                found.append(Prediction(sample.id, None))
                continue
            scores, rows = next(ranked)
            allowed = [
                (memory[0][i], s) for s, i in zip(scores, rows, strict=True) if memory[0][i] not in sample.forbidden
            ]
            ids, values = zip(*allowed[:depth], strict=True) if allowed else ((), ())
            found.append(Prediction(sample.id, None, ids, values))
    return found


def _document_pixels(dataset: Dataset) -> tuple[list[str], Tensor]:
    """Ids of the documents with a picture, sorted, and its features. What is damaged has none, and counts."""
    ids, names, parts = sorted(dataset.store.ids), list[str](), list[Tensor]()
    for start in range(0, len(ids), AT_ONCE):
        pictured = [d for d in dataset.store.read(ids[start : start + AT_ONCE]) if d.image is not None]
        for document in pictured:
            try:
                parts.append(pixel_features([document.image] if document.image is not None else []))
            except ImageError as error:
                dataset.store.condemn(document.id, error.reason)
            else:
                names.append(document.id)
    return names, torch.cat([pixel_features([]), *parts])


def bm25(dataset: Dataset, samples: Sequence[Sample], *, depth: int = DEPTH) -> list[Prediction]:
    """Retrieval only: documents by BM25 of the question's words with their texts (`retriever.bm25`).

    A picture is not looked at: of picture questions only what their words find.
    """
    index = Bm25(dataset.store)
    words = words_of(samples)
    asked, barred = [sample.question for sample in words], forbidden_of(words)
    ids, scores = index.search(asked, k=min(depth, len(index.ids)), forbidden=barred)
    return [Prediction(s.id, None, tuple(i), tuple(v)) for s, i, v in zip(words, ids, scores, strict=True)]
