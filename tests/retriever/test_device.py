"""Where an index is searched, on machines without a GPU and (as far as faiss lets itself be replaced) with one."""

from __future__ import annotations

import numpy
import pytest
import torch

from retriever import index as index_files
from retriever.faiss_import import faiss
from retriever.index import Index, Manifest


def small() -> Index:
    return Index.from_embeddings(torch.eye(4), list("abcd"), Manifest("e", "w", "s", 0, 4, 4))


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said: list[str] = []
    assert small().placed("auto", say=said.append).search(torch.eye(4), k=1)[0] == [["a"], ["b"], ["c"], ["d"]]
    assert said == []
    with pytest.raises(ValueError, match=r"index\.device is 'gpu', but this machine has no GPU"):
        small().placed("gpu", say=said.append)


def test_a_gpu_that_faiss_cannot_use_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delattr(faiss, "StandardGpuResources", raising=False)
    said: list[str] = []
    assert len(small().placed("auto", say=said.append)) == 4
    assert len(said) == 1 and said[0].startswith("the index is searched on the CPU: faiss was installed without GPU")
    with pytest.raises(ValueError, match="use auto or cpu"):
        small().placed("gpu", say=said.append)


def test_what_a_gpu_gives_is_searched_with_its_limits(monkeypatch: pytest.MonkeyPatch):
    """A stand-in for the GPU's index, which refuses more than 2,048 rows as the real one does."""

    class Limited(faiss.IndexFlatIP):
        def search(self, x, k, **options):
            assert k <= 2048
            return faiss.IndexFlatIP.search(self, x, k, **options)

    vectors = torch.ones(3000, 2)

    def copied(index):
        limited = Limited(2)
        limited.add(vectors.numpy())
        return limited, None

    index = Index.from_embeddings(vectors, [f"d{i:04}" for i in range(3000)], Manifest("e", "w", "s", 0, 2, 3000))
    monkeypatch.setattr(index_files, "why_not_on_gpu", lambda vectors, **options: "")
    monkeypatch.setattr(index_files, "copied_to_gpu", copied)
    ids, _ = index.placed("gpu", say=print).search(torch.ones(1, 2), k=5)  # 3,000 ties: more than it can tell apart
    assert len(set(ids[0])) == 5


@pytest.mark.parametrize("factory", ["IVF2,Flat", "Flat"])
def test_deleted_documents_keep_an_index_from_a_gpu(factory: str, monkeypatch: pytest.MonkeyPatch):
    """A GPU's index takes a selector and does not look at it, so it would find them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1, raising=False)
    copied: list[int] = []
    monkeypatch.setattr(index_files, "copied_to_gpu", lambda vectors: (copied.append(vectors.ntotal) or vectors, None))
    vectors = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    made = faiss.index_factory(4, factory, faiss.METRIC_INNER_PRODUCT)
    made.train(vectors.numpy())
    made.add(vectors.numpy())
    manifest = Manifest("e", "w", "s", 0, 4, 38, factory=factory, effort=2, num_dead=2)

    def index() -> Index:
        return Index(made, [f"d{i}" for i in range(40)], manifest, dead=numpy.array([3, 5]))

    said: list[str] = []
    found, _ = index().placed("auto", say=said.append).search(vectors[3:4], k=38)
    assert len(found[0]) == 38 and not {"d3", "d5"} & set(found[0]) and copied == []
    assert "it has 2 deleted or replaced vectors, which a GPU would find; `python -m retriever.build" in said[0]
    with pytest.raises(ValueError, match=r"index\.device is .gpu., but it has 2 deleted .*--index\.max_overhead 0"):
        index().placed("gpu", say=said.append)
    if factory != "Flat":  # which never has them: it is copied without
        compacted = index().compacted().placed("gpu", say=said.append)
        assert copied == [38] and not {"d3", "d5"} & set(compacted.search(vectors[3:4], k=38)[0][0])
