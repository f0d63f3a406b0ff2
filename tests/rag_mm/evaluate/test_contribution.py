"""Contributions against the training program's own likelihood of an answer given one document."""

from __future__ import annotations

import math

import pytest
import torch

from rag_mm.evaluate.answer import Answerer, Run, weights
from rag_mm.evaluate.contribution import contributions
from rag_mm.evaluate.prediction import Prediction
from rag_mm.model import build_model


def test_likelihood_of_the_answer_with_each_document_alone(run: Run) -> None:
    """The slow twin: the generation loss of the training program, one document and one question at a time."""
    samples = [s for s in run.dataset.questions("test") if s.field == "capital"][:3]
    ids = run.dataset.store.ids
    predictions = [
        Prediction(samples[0].id, "Kathmandu", (ids[0], ids[5], ids[9]), (0.9, 0.5, 0.1), 2),
        Prediction(samples[1].id, "", (ids[3],), (0.9,), 1),
        Prediction(samples[2].id, "Brasilia, in the middle of the country", (ids[3], ids[0]), (0.9, 0.5), 2),
    ]
    answerer = Answerer(run.config, run.dataset, run.model, None, batch_size=2)  # batches cut through questions
    found = contributions(answerer, samples, predictions)
    assert [len(parts) for parts in found] == [2, 1, 2]  # of those that were read

    training, encoder, collator = build_model(run.config, run.dataset), run.model.encoder, run.model.collator
    for name, tensor in weights(training).items():
        tensor.copy_(weights(run.model)[name])
    reader = training.reader.eval()
    for sample, prediction, parts in zip(samples, predictions, found, strict=True):
        assert sum(part.share for part in parts) == pytest.approx(1)
        if len(parts) == 2:
            odds = math.exp(parts[0].log_likelihood - parts[1].log_likelihood)
            assert parts[0].share / parts[1].share == pytest.approx(odds)
        for name, part in zip(prediction.document_ids, parts, strict=False):
            (document,) = run.dataset.store.fetch([name])
            image, theirs = collator.images([sample.image]), collator.images([document.image])
            batch = collator.context([sample.question], [[document]], image, theirs)
            batch["query_embedding"] = encoder(encoder.features([sample.question], *image)).detach()
            batch["document_embedding"] = encoder(encoder.features([document.search_text], *theirs)).detach()
            answers = collator.answers([prediction.answer or ""], torch.ones(1))
            is_target = (answers["target"] != collator.pad).to(torch.get_default_dtype())
            batch |= {**answers, "target_weight": is_target, "sample_id": torch.zeros(1, dtype=torch.int64)}
            with torch.no_grad():
                losses = reader.run(batch)["losses"]
            expected = -losses[0, 0].item() / run.config.objectives.generation
            assert part.log_likelihood == pytest.approx(expected, abs=1e-5)


def test_nothing_read_nothing_contributed(run: Run) -> None:
    samples = list(run.dataset.questions("test"))[:2]
    predictions = [Prediction(samples[0].id, "x"), Prediction(samples[1].id, None, (run.dataset.store.ids[0],), (1.0,))]
    answerer = Answerer(run.config, run.dataset, run.model, None)
    assert contributions(answerer, samples, predictions) == [(), ()]
