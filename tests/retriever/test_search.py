"""Search on top of faiss: ties, forbidden documents, few lists, and parts on several ranks."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retriever.faiss_import import faiss
from retriever.index import Index, Manifest, load
from retriever.sharded import ShardedIndex, load_sharded, merge
from tests.distributed import run_on_ranks


def manifest(count: int, dim: int, *, factory: str = "Flat", effort: int = 0) -> Manifest:
    return Manifest("e", "w", "s", 0, dim, count, factory=factory, effort=effort)


def flat(embedding: torch.Tensor, ids: list[str]) -> Index:
    return Index.from_embeddings(embedding, ids, manifest(*embedding.shape))


def of_kind(factory: str, embedding: torch.Tensor, *, effort: int = 1) -> Index:
    """An index of one of the kinds that are not exact."""
    vectors = faiss.index_factory(embedding.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    vectors.train(embedding.numpy())
    vectors.add(embedding.numpy())
    ids = [f"d{i:04}" for i in range(len(embedding))]
    return Index(vectors, ids, manifest(*embedding.shape, factory=factory, effort=effort))


def twin(embedding: torch.Tensor, ids: list[str], query: torch.Tensor, k: int, barred: set[str]) -> list[str]:
    """All scores in whole numbers, sorted."""
    scores = (embedding.long() @ query.long()).tolist()
    return [name for _, name in sorted((-s, name) for s, name in zip(scores, ids, strict=True) if name not in barred)][
        :k
    ]


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no fault
@given(data=st.data())
def test_ties_and_forbidden_documents_whatever_the_parts(data: st.DataObject):
    """Small whole numbers: half of the vectors are equal, and every score is exact."""
    count, dim = data.draw(st.integers(2, 120)), data.draw(st.integers(1, 4))
    seed = data.draw(st.integers(0, 2**31))
    rng = numpy.random.default_rng(seed)
    embedding = torch.from_numpy(rng.integers(-1, 2, (count, dim))).float()
    ids = [f"d{i}" for i in rng.permutation(count)]
    num_queries = data.draw(st.sampled_from([1, 5, 30]))  # faiss computes 20 and more in another way
    query = torch.from_numpy(rng.integers(-2, 3, (num_queries, dim))).float()
    forbidden = [set(rng.choice(ids, rng.integers(0, count // 2), replace=False)) for _ in range(num_queries)]
    k = data.draw(st.integers(1, count - max(map(len, forbidden))))
    found, scores = flat(embedding, ids).search(query, k=k, forbidden=forbidden)
    assert found == [twin(embedding, ids, q, k, barred) for q, barred in zip(query, forbidden, strict=True)]
    num_parts = data.draw(st.integers(1, 4))
    part_of = rng.integers(0, num_parts, count)
    parts = []
    for part in range(num_parts):
        rows = numpy.nonzero(part_of == part)[0]
        index = flat(embedding[rows], [ids[row] for row in rows])
        score, row = index.best(query, k=k, forbidden=forbidden)
        parts.append(
            (
                [[index.id(r) for r in one if r >= 0] for one in row.tolist()],
                [[s for s in one if s > -numpy.inf] for one in score.tolist()],
            )
        )
    merged_ids, merged_scores = merge(parts, k=k)
    assert merged_ids == found and torch.equal(merged_scores, scores)


def rounding_case(seed: int) -> tuple[torch.Tensor, list[str], torch.Tensor]:
    """Vectors whose scores differ in the last bits, some of them equal."""
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(700, 96, generator=generator)
    embedding[350:] = embedding[:350] * (1 + 1e-7 * torch.randn(350, 1, generator=generator))
    embedding[600:] = embedding[:100]
    return (
        embedding,
        [f"d{i}" for i in torch.randperm(700, generator=generator).tolist()],
        torch.randn(40, 96, generator=generator),
    )


def search_part(seed: int, k: int) -> tuple[list[list[str]], torch.Tensor]:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    embedding, ids, query = rounding_case(seed)
    sharded = ShardedIndex(flat(embedding[rank::size], ids[rank::size]))
    assert len(sharded) == 700
    with pytest.raises(ValueError, match="k is 701; the memory holds 700"):
        sharded.search(query, k=701)
    return sharded.search(query, k=k, forbidden=[{f"d{i}"} for i in range(40)])


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("k", [5, 400])  # more than a part holds
def test_ranks_find_what_one_finds_bit_for_bit(num_ranks: int, k: int):
    embedding, ids, query = rounding_case(k)
    right = flat(embedding, ids).search(query, k=k, forbidden=[{f"d{i}"} for i in range(40)])
    for found, scores in run_on_ranks(search_part, num_ranks, k, k):
        assert found == right[0] and torch.equal(scores, right[1])


def test_a_query_that_may_find_too_little_is_refused():
    index = flat(torch.eye(4), list("abcd"))
    with pytest.raises(ValueError, match="k is 3, but a query is left with 2 documents"):
        index.search(torch.ones(2, 4), k=3, forbidden=[set(), {"b", "d"}])
    assert index.search(torch.ones(1, 4), k=2, forbidden=[{"b", "d", "not there"}])[0] == [["a", "c"]]


def clustered(count: int = 1500, dim: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    centres = torch.randn(30, dim, generator=generator)
    embedding = centres[torch.randint(30, (count,), generator=generator)] + 0.3 * torch.randn(
        count, dim, generator=generator
    )
    return embedding, centres[:25] + 0.3 * torch.randn(25, dim, generator=generator)


@pytest.mark.parametrize(
    "factory", ["IVF64,Flat", "IVF64,SQfp16", "IVF64,PQ4x4", "PCA8,IVF64_HNSW8,PQ4x4", "HNSW8,Flat"]
)
@pytest.mark.parametrize("k", [1, 300, 1500])
def test_few_lists_never_mean_few_documents(factory: str, k: int):
    embedding, query = clustered()
    index = of_kind(factory, embedding, effort=1)
    found, scores = index.search(query, k=k)
    assert all(len(set(row)) == k for row in found) and bool((scores[:, 1:] <= scores[:, :-1]).all())
    own = [{row[0]} for row in found]
    if k < 1500:
        again, _ = index.search(query, k=k, forbidden=own)
        assert all(not barred & set(row) and len(set(row)) == k for row, barred in zip(again, own, strict=True))
    if k == 1500 and factory in ("IVF64,Flat", "HNSW8,Flat"):  # everything was visited, so it is exact
        assert found == flat(embedding, list(index.ids)).search(query, k=k)[0]


def recall(found: list[list[str]], right: list[list[str]]) -> float:
    return sum(len(set(a) & set(b)) for a, b in zip(found, right, strict=True)) / sum(map(len, right))


def load_and_search(folder: Path, query: torch.Tensor) -> tuple[list[list[str]], int]:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    sharded = load_sharded(folder, rank=rank, num_ranks=size)
    return sharded.search(query, k=10)[0], sharded.part.vectors.ntotal


@pytest.mark.parametrize("factory", ["Flat", "IVF64,Flat", "HNSW8,Flat"])
def test_a_published_index_is_searched_by_ranks_in_parts(factory: str, tmp_path: Path):
    embedding, query = clustered()
    whole = of_kind(factory, embedding, effort=8)
    whole.publish(tmp_path)
    if factory != "Flat":
        whole = load(tmp_path).replaced(["new", "d0003"], torch.stack([query[0], query[1]]) * 9, num_edits=2)
        whole.publish(tmp_path)
    right = whole.search(query, k=10)[0]
    exact = flat(embedding, [f"d{i:04}" for i in range(1500)]).search(query, k=10)[0]
    for found, count in run_on_ranks(load_and_search, 2, tmp_path, query):
        if factory == "IVF64,Flat":  # each may have visited more lists
            assert recall(found, exact) >= recall(right, exact) > 0.5 and found[0][0] == "new"
        else:
            assert found == right
        assert factory != "Flat" or count == 750
