"""The build command where an index is there already: what it reads, embeds and refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

from data.dataset import Dataset
from data.document_store import Document
from rag_mm.evaluate.fact_edit import copy_dataset
from retriever import build
from retriever import index as index_files
from retriever.build import fresh_encoder, main
from retriever.checkpoint_files import seal, write_tensors
from retriever.config import RetrieverConfig
from retriever.embed import document_features
from retriever.faiss_import import faiss
from retriever.index import Index, Manifest, load
from retriever.manifest import read_manifest
from retriever.upkeep import without_rows
from retriever.vector_files import inverted_lists

SMALL = RetrieverConfig(text_buckets=256, text_dim=32, image_dim=8, image_width=8, image_patch=8)
FLAGS = [f"--retriever.{name}={getattr(SMALL, name)}" for name in
         ("text_buckets", "text_dim", "image_dim", "image_width", "image_patch")]  # fmt: skip


class Memory:
    """A data set that may be changed, a checkpoint, and the command that builds the index of both."""

    def __init__(self, factbook_dir: Path, folder: Path) -> None:
        copy_dataset(factbook_dir, folder / "data")
        self.dataset, self.index = Dataset(folder / "data"), folder / "index"
        self.store, self.checkpoint = self.dataset.store, folder / "checkpoint"
        self.image = self.store.fetch(["np"])[0].image
        encoder = fresh_encoder(SMALL, self.dataset, image_size=24, seed=0)
        tensors = {f"retriever.{name}": tensor for name, tensor in encoder.state_dict().items()}
        self.checkpoint.mkdir()
        seal(self.checkpoint, {}, write_tensors(self.checkpoint, tensors, rank=0, group=None, no_dist=True))

    def arguments(self, *more: str, checkpoint: bool = True) -> list[str]:
        return [
            "--data.dir", str(self.dataset.directory), "--index.dir", str(self.index), "--index.batch_size", "5",
            "--index.factory", "IVF4,Flat", "--index.recall_queries", "20",
            "--index.checkpoint", str(self.checkpoint) if checkpoint else "", *FLAGS, *more,
        ]  # fmt: skip

    def build(self, *more: str, checkpoint: bool = True) -> int:
        return main(self.arguments(*more, checkpoint=checkpoint))

    def add(self, *names: str, image: bytes | None = None) -> None:
        for name in names:
            self.store.add(Document(name, name.title(), {"capital": "Poseidonia"}, image or self.image))

    @property
    def manifest(self) -> Manifest:
        version = (self.index / "CURRENT").read_text().strip()
        return read_manifest(self.index / "versions" / version / "manifest.json")


@pytest.fixture
def memory(factbook_dir: Path, tmp_path: Path) -> Memory:
    return Memory(factbook_dir, tmp_path)


@pytest.mark.parametrize("factory", ["IVF4,Flat", "HNSW8,Flat", "Flat"])
def test_too_many_damaged_documents_are_refused_as_by_a_rebuild(
    factory: str, memory: Memory, capsys: pytest.CaptureFixture[str]
):
    options = ("--index.factory", factory, "--data.max_bad_share", "0.05")
    assert memory.build(*options) == 0
    memory.add("bad1", "bad2", image=b"no picture")
    assert memory.build(*options) == 0  # 2 of 66
    assert memory.manifest.num_damaged == 2
    memory.add("bad3", "bad4", "bad5", image=b"no picture")
    files = sorted(path.name for path in (memory.index / "versions").iterdir())
    assert memory.build(*options) == 1  # 3 of these 69 are no more than allowed, but 5 are
    said = capsys.readouterr().err
    assert "built anew: too many documents may be damaged" in said and "samples read are bad" in said
    assert sorted(path.name for path in (memory.index / "versions").iterdir()) == files
    for name in ("bad1", "bad2"):
        memory.store.delete(name)
    assert memory.build(*options) == 0  # by the rebuild, which counts them
    assert memory.manifest.num_damaged == 3 and len(load(memory.index)) == len(memory.store)
    memory.add("bad6", "bad7", "bad8", "bad9", image=b"no picture")
    capsys.readouterr()
    assert memory.build(*options, "--data.max_bad_share", "0.01") == 1
    assert "built anew" not in capsys.readouterr().err  # these four alone are too many
    assert memory.build(*options, "--data.max_bad_share", "0.5") == 0
    assert memory.manifest.num_damaged == 7 and memory.manifest.num_added == (0 if factory == "Flat" else 4)


@pytest.mark.parametrize("name", ["ids", "index.faiss", "added.faiss", "dead"])
def test_what_is_up_to_date_is_checked_but_not_loaded(
    name: str, memory: Memory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert memory.build() == 0
    memory.add("atlantis")
    memory.store.delete("np")
    assert memory.build() == 0
    with monkeypatch.context() as patched:
        patched.setattr(index_files, "load", lambda *_, **__: pytest.fail("the index was loaded"))
        assert memory.build() == 0
    assert "version 1 is up to date" in capsys.readouterr().err
    path = memory.index / "versions" / "1" / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()  # index.faiss is that of version 0, too
    path.write_bytes(data)
    assert memory.build() == 0
    assert f"{name} is damaged" in capsys.readouterr().err
    assert index_files.list_versions(memory.index)[-1] == 2 and memory.manifest.num_added == 0


def test_lists_stay_on_the_disk_and_documents_come_in_batches(memory: Memory, monkeypatch: pytest.MonkeyPatch):
    assert memory.build() == 0
    memory.add(*(f"new{i}" for i in range(12)))
    kinds, sizes = list[str](), list[int]()
    replaced = Index.replaced

    def watched(index: Index, ids, batches, **options):
        kinds.append(type(faiss.downcast_InvertedLists(inverted_lists(index.vectors).invlists)).__name__)
        return replaced(index, ids, (sizes.append(len(batch)) or batch for batch in batches), **options)

    monkeypatch.setattr(Index, "replaced", watched)
    assert memory.build("--index.max_overhead", "0.9") == 0
    assert kinds == ["OnDiskInvertedLists"] and sizes == [5, 5, 2]
    assert memory.manifest.num_added == 12
    memory.add("one more")
    assert memory.build("--index.max_overhead", "0.01") == 0  # compacted
    index = load(memory.index)
    assert (kinds[1:], sizes[3:], index.overhead) == (["OnDiskInvertedLists"], [1], 0)
    assert sorted(index.ids) == sorted(memory.store.ids)


def test_an_index_is_compacted_although_nothing_changed(memory: Memory, capsys: pytest.CaptureFixture[str]):
    assert memory.build() == 0
    memory.add("atlantis")
    memory.store.delete("np")
    assert memory.build() == 0 and memory.manifest.overhead > 0
    assert memory.build("--index.max_overhead", "0") == 0
    assert "compacted" in capsys.readouterr().err and memory.manifest.overhead == 0
    assert sorted(load(memory.index).ids) == sorted(memory.store.ids)
    assert memory.build("--index.max_overhead", "0") == 0
    assert "version 2 is up to date" in capsys.readouterr().err


def test_a_checkpoint_embeds_only_what_changed_and_untrained_gates_everything(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
):
    embedded: list[int] = []
    read = build.DocumentStore.read
    monkeypatch.setattr(
        build.DocumentStore, "read", lambda store, ids, **how: embedded.append(len(ids)) or read(store, ids, **how)
    )
    assert memory.build() == 0 and sum(embedded) == len(memory.store)
    embedded.clear()
    memory.add("atlantis")
    assert memory.build() == 0 and embedded == [1]
    weights = memory.manifest.weights
    embedded.clear()
    assert memory.build(checkpoint=False) == 0  # fitted to the memory with Atlantis in it
    assert memory.manifest.weights != weights and memory.manifest.num_added == 0
    weights = memory.manifest.weights
    memory.add("lemuria")
    embedded.clear()
    assert memory.build(checkpoint=False) == 0
    assert memory.manifest.weights != weights and sum(embedded) == 2 * len(memory.store)  # gates, then all of them


def test_the_manifest_names_all_that_is_embedded(memory: Memory, capsys: pytest.CaptureFixture[str]):
    encoder = fresh_encoder(SMALL, memory.dataset, image_size=24, seed=0)
    whole = Document("a", "Atlantis", {"capital": "Poseidonia"}, memory.image, passage="An island that sank.")
    others = {
        "title": replace(whole, title="Lemuria"), "passage": replace(whole, passage="A land bridge."),
        "picture": replace(whole, image=None), "fields": replace(whole, fields={}),
    }  # fmt: skip
    features = document_features(encoder, [whole, *others.values()], image_size=24)
    embedding = encoder(features)
    counts = [name for name, row in zip(others, embedding[1:], strict=True) if not torch.allclose(row, embedding[0])]
    assert memory.build() == 0 and memory.manifest.template == ", ".join(counts)
    path = memory.index / "versions" / "0" / "manifest.json"
    replace(memory.manifest, template="title, picture").write(path)
    capsys.readouterr()
    assert memory.build() == 0
    assert "its template is 'title, picture', needed is 'title, passage, picture'" in capsys.readouterr().err
    assert memory.manifest.template == "title, passage, picture" and index_files.list_versions(memory.index) == [0, 1]


@pytest.mark.parametrize("factory", ["IVF4,Flat", "PCA4,IVF4_HNSW4,SQ8"])
def test_a_mapped_index_is_compacted_to_what_one_in_memory_is(factory: str, tmp_path: Path):
    vectors = numpy.random.default_rng(0).standard_normal((80, 8), dtype=numpy.float32)
    made = faiss.index_factory(8, factory, faiss.METRIC_INNER_PRODUCT)
    made.train(vectors)
    made.add(vectors)
    manifest = Manifest("e", "w", "s", 0, 8, 80, factory=factory, effort=2)
    Index(made, [f"d{i}" for i in range(80)], manifest).publish(tmp_path)
    new = torch.from_numpy(vectors[:7])
    found = []
    for mapped in (False, True):
        index = load(tmp_path, mapped=mapped)
        changed = index.replaced([f"n{i}" for i in range(7)], iter(new.split(3)), num_edits=9, gone={"d3", "d50"})
        compacted = changed.compacted()
        assert len(compacted) == 85 and compacted.overhead == 0
        found.append((compacted.ids, faiss.serialize_index(compacted.vectors).tobytes()))
        query = torch.from_numpy(vectors[20:30])
        before = load(tmp_path).search(query, k=80)
        assert index.search(query, k=80)[0] == before[0]  # what was compacted is as it was
        if factory == "IVF4,Flat":  # codes are not what was added
            assert compacted.search(query, k=85)[0] == changed.search(query, k=85)[0]
    assert found[0] == found[1]


def test_batches_are_what_one_tensor_is(tmp_path: Path):
    vectors = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    index = Index.from_embeddings(vectors, [f"d{i}" for i in range(20)], Manifest("e", "w", "s", 0, 4, 20))
    ids = ["d3", "new", "d7", "newer", "d1"]
    whole = index.replaced(ids, vectors[5:10] * 2, num_edits=5)
    parts = index.replaced(ids, iter((vectors[5:10] * 2).split(2)), num_edits=5)
    assert parts.ids == whole.ids and parts.manifest == whole.manifest
    assert faiss.serialize_index(parts.vectors).tobytes() == faiss.serialize_index(whole.vectors).tobytes()


def test_a_copy_without_vectors_leaves_the_original_whole():
    vectors = numpy.random.default_rng(0).standard_normal((40, 4), dtype=numpy.float32)
    made = faiss.index_factory(4, "IVF2,Flat", faiss.METRIC_INNER_PRODUCT)
    made.train(vectors)
    made.add(vectors)
    before = faiss.serialize_index(made).tobytes()
    less = without_rows(made, numpy.arange(0, 40, 2), vectors[:0])
    assert less.ntotal == 20 and faiss.serialize_index(made).tobytes() == before
