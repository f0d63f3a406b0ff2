"""Flat indices made into quicker ones: as good as asked for, by a plain count of what the exact search finds."""

from __future__ import annotations

import numpy
import pytest
import torch

from retriever.approximate import approximate
from retriever.index import Index
from retriever.recall import complaint
from retriever.sizing import kind_of
from tests.retriever.test_index import make


def clustered(count: int, dim: int, seed: int) -> torch.Tensor:
    """Vectors around thirty centres, which are the same for every seed."""
    centres = numpy.random.default_rng(0).standard_normal((30, dim))
    draw = numpy.random.default_rng(seed)
    return torch.from_numpy(centres[draw.integers(30, size=count)] + draw.standard_normal((count, dim))).float()


def flat(count: int, dim: int) -> Index:
    index, _ = make(count, dim)
    return Index.from_embeddings(clustered(count, dim, 1), index.ids, index.manifest)


def share_found(index: Index, right: Index, query: torch.Tensor) -> float:
    pairs = zip(index.search(query, k=10)[0], right.search(query, k=10)[0], strict=True)
    return sum(len(set(a) & set(b)) for a, b in pairs) / (10 * len(query))


@pytest.mark.parametrize("factory", ["IVF30,Flat", "HNSW16,Flat", "IVF30_HNSW8,SQfp16", "auto"])
def test_it_finds_what_was_asked_for(factory: str):
    exact = flat(2000, 16)
    made = approximate(exact, factory, query_QE=clustered(200, 16, 2), num_queries=9, recall=0.9)
    assert made.manifest.factory == kind_of(factory, 2000, 16) != "Flat"
    assert made.manifest.recall_queries == 100 and len(made) == 2000 and made.ids == exact.ids
    found = share_found(made, exact, clustered(300, 16, 3))
    assert found + 0.02 >= 0.9 and made.manifest.recall_at_10 == pytest.approx(found, abs=0.05)
    again = approximate(exact, factory, query_QE=clustered(200, 16, 2), num_queries=9, recall=0.9)
    assert again.manifest == made.manifest
    assert again.search(clustered(50, 16, 4), k=7)[0] == made.search(clustered(50, 16, 4), k=7)[0]


def test_without_queries_its_own_vectors_are_asked():
    made = approximate(flat(2000, 16), "IVF30,Flat", query_QE=None, num_queries=64, recall=0.9)
    assert made.manifest.recall_queries == 32 and made.manifest.recall_at_10 > 0.8


def test_what_is_exact_or_tiny_stays_as_it_is():
    exact, tiny = flat(300, 16), flat(9, 16)
    assert approximate(exact, "Flat", query_QE=None, num_queries=9, recall=0.9) is exact
    assert approximate(exact, "auto", query_QE=None, num_queries=9, recall=0.9) is exact
    assert approximate(tiny, "IVF3,Flat", query_QE=None, num_queries=9, recall=0.9) is tiny


@pytest.mark.parametrize("factory", ["IVF300,Flat", "IVF8,PQ5", "PCA32,IVF8,Flat"])
def test_a_kind_that_does_not_fit_is_named(factory: str):
    with pytest.raises(ValueError, match=f"index.train_factory is '{factory}', which does not fit 100 documents"):
        approximate(flat(100, 16), factory, query_QE=None, num_queries=9, recall=0.9)


def test_codes_that_find_too_little_are_complained_of():
    made = approximate(flat(2000, 16), "IVF8,PQ2", query_QE=None, num_queries=64, recall=0.9)
    assert made.manifest.recall_at_10 < 0.9 and "below index.recall (0.9)" in complaint(made.manifest, 0.9)
    assert not complaint(made.manifest, 0.0) and not complaint(flat(20, 16).manifest, 0.9)
