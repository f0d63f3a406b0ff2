"""What evaluation reads where words are fused with embeddings (``retriever.hybrid``), against a loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from data.dataset import Sample
from rag_mm.evaluate.layout import Layout
from rag_mm.evaluate.retrieval import Found, Retrieval
from rag_mm.evaluate.run import Run
from retriever.bm25 import Bm25
from retriever.embed import embed_documents, make_manifest
from retriever.index import Index

DEPTH, WIDE = 4, 6


def found(run: Run, samples: Sequence[Sample], **hybrid: Any) -> list[Found]:
    config = dataclasses.replace(run.config, retriever=dataclasses.replace(run.config.retriever, **hybrid))
    encoder, store, layout = run.model.encoder, run.dataset.store, Layout.whole(run.model)
    manifest = make_manifest(encoder, store, image_size=config.data.image_size, weights=layout.document_hash())
    memory = embed_documents(encoder, store, store.ids, image_size=config.data.image_size, batch_size=64)
    index = Index.from_batches([memory], store.ids, manifest)
    return Retrieval(config, run.dataset, run.model.collator, layout, index, depth=DEPTH).find(samples, "retrieved")


def points(how: str, ranking: list[tuple[float, str]]) -> dict[str, float]:
    """What one side gives to each document that it finds, best first."""
    if how == "reciprocal_rank":
        return {name: 1 / (60 + rank) for rank, (_, name) in enumerate(ranking, start=1)}
    high, low = ranking[0][0], ranking[-1][0]
    return {name: (score - low) / (high - low) if high > low else 1.0 for score, name in ranking}


@pytest.mark.parametrize("weight", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("how", ["reciprocal_rank", "weighted_sum"])
def test_it_is_the_fusion_of_both_searches(run: Run, how: str, weight: float) -> None:
    questions = run.dataset.questions("test")
    samples = questions.read([i * len(questions) // 16 for i in range(16)])
    plain = found(run, samples)
    fused = found(run, samples, hybrid=how, hybrid_weight=weight, hybrid_depth=WIDE)
    store, words = run.dataset.store, Bm25(run.dataset.store)
    with torch.no_grad():
        memory = embed_documents(run.model.encoder, store, store.ids, image_size=24, batch_size=64)
    for sample, alone, own in zip(samples, plain, fused, strict=True):
        score = (memory @ own.query_E).tolist()
        dense = sorted(zip(score, store.ids, strict=True), key=lambda one: (-one[0], one[1]))[:WIDE]
        assert list(alone.ids) == [name for _, name in dense[:DEPTH]]
        ids, lexical = words.search([sample.question], k=WIDE)
        ours, theirs = points(how, dense), points(how, list(zip(lexical[0], ids[0], strict=True)))
        total = {
            name: (1 - weight) * ours.get(name, 0.0) + weight * theirs.get(name, 0.0) for name in {**ours, **theirs}
        }
        best = sorted(total, key=lambda name: (-total[name], name))[:DEPTH]
        assert own.scores == pytest.approx([total[name] for name in best], abs=1e-5)
        assert [total[name] for name in own.ids] == pytest.approx([total[name] for name in best], abs=1e-5)
        read = memory[[store.ids.index(name) for name in own.read]]
        torch.testing.assert_close(own.document_kE, read, rtol=0, atol=1e-5)  # which the reader then reads
    assert weight == 0.0 or [one.ids for one in fused] != [one.ids for one in plain]
