"""The index: exact, stable on ties, atomic, and refused when it does not fit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from retriever import index as index_files
from retriever.index import Index, Manifest


def make(count: int = 50, dim: int = 8, *, seed: int = 0) -> tuple[Index, torch.Tensor]:
    embedding = torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))
    ids = [f"d{i:03}" for i in range(count)]
    return Index.from_embeddings(embedding, ids, Manifest("e", "w", "s", 0, dim, count)), embedding


def test_search_is_exact():
    index, embedding = make()
    query = torch.randn(7, 8, generator=torch.Generator().manual_seed(5))
    ids, scores = index.search(query, k=5)
    right = (query @ embedding.T).topk(5, dim=1)
    assert [[int(name[1:]) for name in row] for row in ids] == right.indices.tolist()
    torch.testing.assert_close(scores, right.values)


def test_ties_break_by_id():
    same = torch.ones(6, 4)
    index = Index.from_embeddings(same, ["f", "c", "a", "e", "b", "d"], Manifest("e", "w", "s", 0, 4, 6))
    assert index.search(torch.ones(1, 4), k=3)[0] == [["a", "b", "c"]]


@pytest.mark.parametrize("k", [0, 51])
def test_k_beyond_the_memory_is_refused(k: int):
    with pytest.raises(ValueError, match=f"k is {k}; the memory holds 50 documents"):
        make()[0].search(torch.ones(1, 8), k=k)


def test_vectors_and_ids_out_of_step_are_refused():
    index, embedding = make()
    with pytest.raises(ValueError, match="out of step: 50 vectors, 49 ids"):
        Index.from_embeddings(embedding, index.ids[1:], index.manifest)


def test_publish_load_and_replace(tmp_path: Path):
    index, _ = make()
    assert index.publish(tmp_path) == 0
    loaded = index_files.load(tmp_path)
    query = torch.randn(3, 8, generator=torch.Generator().manual_seed(9))
    assert loaded.search(query, k=4)[0] == index.search(query, k=4)[0]
    changed = loaded.replaced(["d007"], 100 * query[:1], num_edits=1)
    assert changed.search(query[:1], k=1)[0] == [["d007"]] and changed.manifest.num_edits == 1
    assert changed.publish(tmp_path) == 1 and index_files.load(tmp_path).manifest.num_edits == 1
    assert index_files.load(tmp_path, version=0).manifest.num_edits == 0


def test_documents_come_and_go():
    torch.manual_seed(1)
    embedding = torch.randn(12, 6)
    manifest = Manifest("e", "w", "s", num_edits=2, dim=6, count=12)
    index = Index.from_embeddings(embedding, [f"d{i}" for i in range(12)], manifest)
    new = torch.randn(3, 6)
    changed = index.replaced(["d4", "new", "newer"], new, num_edits=9, gone={"d0", "d11"})
    # the twin: a dictionary of vectors, searched by sorting
    vectors = {f"d{i}": embedding[i] for i in range(1, 11)} | {"d4": new[0], "new": new[1], "newer": new[2]}
    assert changed.manifest == replace(manifest, num_edits=9, count=12) and changed.ids == list(vectors)
    query = torch.randn(5, 6)
    for row in range(5):
        best = sorted(vectors, key=lambda name: (-float(vectors[name] @ query[row]), name))
        assert changed.search(query[row : row + 1], k=12)[0] == [best]
    emptied = changed.replaced([], torch.zeros(0, 6), num_edits=10, gone=set(changed.ids) - {"new"})
    assert emptied.search(query[:1], k=1)[0] == [["new"]] and emptied.manifest.count == 1


def test_a_flipped_bit_is_refused_before_faiss_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    index, _ = make()
    index.publish(tmp_path)
    path = tmp_path / "versions" / "0" / "index.faiss"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    monkeypatch.setattr(index_files.faiss, "read_index", lambda name: pytest.fail("faiss read a damaged file"))
    with pytest.raises(ValueError, match="damaged"):
        index_files.load(tmp_path)


def test_a_mismatch_names_both_sides():
    manifest = make()[0].manifest
    with pytest.raises(ValueError, match="its weights is 'w', needed is 'other'"):
        manifest.check(replace(manifest, weights="other"), where="here")
    manifest.check(replace(manifest, num_edits=3), where="here")  # it may cover fewer edits than there are
    manifest.check(replace(manifest, num_edits=3, count=manifest.count + 1), where="here")  # and so other documents
    with pytest.raises(ValueError, match="its count is"):
        manifest.check(replace(manifest, count=manifest.count + 1), where="here")
    with pytest.raises(ValueError, match="its num_edits is 3, needed is 0"):
        replace(manifest, num_edits=3).check(manifest, where="here")


def test_missing_index_names_the_command(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"python -m retriever\.build"):
        index_files.load(tmp_path)


def test_prune_keeps_the_newest_and_the_named(tmp_path: Path):
    index, _ = make()
    for version in (10, 20, 30, 40):
        index.publish(tmp_path, version=version)
    index_files.prune(tmp_path, keep=1, named={20})
    assert index_files.list_versions(tmp_path) == [20, 40]


def test_an_interrupted_publish_leaves_the_old_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    index, _ = make()
    index.publish(tmp_path)

    def crash(self, target):
        raise OSError("power cut")

    monkeypatch.setattr(Path, "rename", crash)
    with pytest.raises(OSError, match="power cut"):
        index.publish(tmp_path)
    monkeypatch.undo()
    assert index_files.load(tmp_path).manifest == replace(
        index.manifest, sha256=index_files.load(tmp_path).manifest.sha256
    )
    assert index_files.list_versions(tmp_path) == [0]


def test_an_index_that_cannot_be_written_leaves_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    index, _ = make()
    index.publish(tmp_path)

    def full(*arguments: object) -> None:
        raise RuntimeError("write error (No space left on device)")

    monkeypatch.setattr(index_files.faiss, "write_index", full)
    with pytest.raises(OSError, match=r"version 1 .*could not be written.*No space left"):
        index.publish(tmp_path)
    assert index_files.load(tmp_path).ids == index.ids and index_files.list_versions(tmp_path) == [0]
    assert [path.name for path in (tmp_path / "versions").iterdir()] == ["0"]
