"""Where an index is searched, on machines without a GPU and (as far as faiss lets itself be replaced) with one."""

from __future__ import annotations

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
    monkeypatch.setattr(index_files, "why_not_on_gpu", lambda vectors: "")
    monkeypatch.setattr(index_files, "copied_to_gpu", copied)
    ids, _ = index.placed("gpu", say=print).search(torch.ones(1, 2), k=5)  # 3,000 ties: more than it can tell apart
    assert len(set(ids[0])) == 5
