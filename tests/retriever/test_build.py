"""The build job after edits, additions and deletions: what it updates is what it would build anew."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.dataset import Dataset
from data.document_store import Document
from rag_mm.evaluate.fact_edit import copy_dataset
from retriever import build
from retriever.build import build_index, fresh_encoder
from retriever.config import RetrieverConfig
from retriever.trigrams import idf_weights


def test_an_updated_index_is_the_index_built_anew(factbook_dir: Path, tmp_path: Path):
    copy_dataset(factbook_dir, tmp_path / "copy")
    dataset = Dataset(tmp_path / "copy")
    encoder = fresh_encoder(RetrieverConfig(), dataset, image_size=24, seed=0)

    def build(directory: str):
        return build_index(
            encoder, dataset, directory=tmp_path / directory, image_size=24, batch_size=16, keep=9
        )  # fmt: skip

    first = build("updated")
    store = dataset.store
    image = store.fetch(["np"])[0].image
    store.add(Document("atlantis", "Atlantis", {"capital": "Poseidonia"}, image))
    store.delete("jp")
    store.edit("br", "capital", "Manaus")
    store.delete("ke")
    store.add(Document("ke", "Kenya, written anew", {"capital": "Nairobi"}, image))
    updated, anew = build("updated"), build("anew")
    assert set(first.ids) - set(updated.ids) == {"jp"} and set(updated.ids) - set(first.ids) == {"atlantis"}
    assert sorted(updated.ids) == sorted(anew.ids) == sorted(store.ids)
    files = {"sha256": "", "ids_sha256": ""}  # the ids are in another order
    assert replace(updated.manifest, **files) == replace(anew.manifest, **files)
    query = torch.randn(8, encoder.dim, generator=torch.Generator().manual_seed(0))
    k = len(store)
    (ids, scores), (ids_anew, scores_anew) = updated.search(query, k=k), anew.search(query, k=k)
    torch.testing.assert_close(scores, scores_anew)
    assert ids == ids_anew
    store.delete("atlantis")  # nothing to embed
    assert sorted(build("updated").ids) == sorted(store.ids)
    assert build("updated").manifest.num_edits == 6


def test_the_gates_read_the_memory_in_parts_and_only_where_there_are_gates(
    factbook_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    dataset = Dataset(factbook_dir)
    whole = fresh_encoder(RetrieverConfig(), dataset, image_size=24, seed=0)
    asked: list[int] = []
    read = dataset.store.read
    monkeypatch.setattr(dataset.store, "read", lambda ids, **how: asked.append(len(ids)) or read(ids, **how))
    monkeypatch.setattr(build, "FETCHED", 7)
    parts = fresh_encoder(RetrieverConfig(), dataset, image_size=24, seed=0)
    assert sum(asked) == len(dataset.store) and max(asked) == 7
    assert torch.equal(parts.text.gate, whole.text.gate)
    texts = [document.search_text for document in read(dataset.store.ids)]
    texts += [sample.question for sample in dataset.questions("train")]
    assert torch.equal(whole.text.gate, idf_weights(texts, num_buckets=4096).square())
    asked.clear()
    fresh_encoder(RetrieverConfig(), dataset, image_size=24, seed=0, weights=False)
    fresh_encoder(RetrieverConfig(text="none"), dataset, image_size=24, seed=0)
    assert not asked
