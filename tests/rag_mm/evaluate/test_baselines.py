from collections import Counter

import torch

from data.dataset import Dataset
from data.images import decode
from rag_mm.evaluate.baselines import most_frequent, pixels


def test_most_frequent_answers_every_question_of_a_field_alike(factbook: Dataset) -> None:
    samples = list(factbook.questions("test"))
    predictions = most_frequent(factbook, samples)
    assert [p.id for p in predictions] == [s.id for s in samples]
    for field in factbook.fields:
        given = {p.answer for p, s in zip(predictions, samples, strict=True) if s.field == field}
        count = Counter(s.answers[0] for s in factbook.questions("train") if s.field == field)
        if given and count:
            assert given == {min(a for a in count if count[a] == max(count.values()))}


def test_pixels_finds_what_a_plain_loop_finds(factbook: Dataset) -> None:
    samples = [s for s in factbook.questions("test") if s.field == "capital"]

    def features(png: bytes) -> torch.Tensor:
        x = decode(png, 12).flatten().double()
        x = x - x.mean()
        return x / x.norm()

    documents = [d for d in factbook.store.fetch(factbook.store.ids) if d.image is not None]
    memory = {d.id: features(d.image) for d in documents if d.image is not None}
    for sample, found in zip(samples, pixels(factbook, samples), strict=True):
        assert found.id == sample.id and found.answer is None
        if sample.image is None:
            assert found.document_ids == ()
        else:
            score = {name: float(features(sample.image) @ x) for name, x in memory.items()}
            assert len(found.document_ids) == 4
            best = sorted(score.values(), reverse=True)[:4]
            assert torch.allclose(torch.tensor(found.scores), torch.tensor(best), atol=1e-5)
            assert all(abs(score[n] - s) < 1e-5 for n, s in zip(found.document_ids, found.scores, strict=True))
