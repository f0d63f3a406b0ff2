"""The id table: what it finds is where tarfile finds it; built once, and again when the shards change."""

import os
import warnings
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from data import kept_table, shards
from data.document import Document
from data.document_ids import DocumentIds
from data.document_store import DocumentStore
from data.document_table import FILE, DocumentTable, build_table
from data.folder import Folder
from data.kept_table import open_table
from tests.data.stores import SlowTwin, assert_is, make_documents, write_store

DOCUMENTS = make_documents()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_store(tmp_path / "store", DOCUMENTS)


def test_the_store_is_the_twin(directory: Path):
    store = DocumentStore(directory)
    assert_is(store, SlowTwin(directory))
    assert store.fetch([d.id for d in DOCUMENTS]) == DOCUMENTS


@settings(deadline=None, max_examples=60)
@given(
    names=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12), unique=True
    ),
    unknown=st.lists(st.text(max_size=12)),
)
def test_every_id_is_found_and_no_other(names: list[str], unknown: list[str], tmp_path_factory: pytest.TempPathFactory):
    documents = [replace(DOCUMENTS[0], id=name) for name in names]
    if not documents:
        return
    directory = write_store(tmp_path_factory.mktemp("ids"), documents, samples_per_shard=3)
    table = open_table(Folder(directory))
    assert list(table.ids(step=2)) == names == [table.id(i) for i in range(len(table))]
    asked = [*unknown, *names[::-1]]
    assert table.find(asked).tolist() == [names.index(name) if name in names else -1 for name in asked]


def test_equal_hashes_are_told_apart(directory: Path, monkeypatch: pytest.MonkeyPatch):
    indices = [shards.load_index(tar) for tar in shards.shard_paths(directory)]
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", lambda name: len(name) % 2)
    table = build_table(indices)
    names = [d.id for d in DOCUMENTS]
    assert table.find([*names, "q/99", "zz"]).tolist() == [*range(30), -1, -1]


def test_an_id_that_occurs_twice_is_named(tmp_path: Path):
    shards.write_shards(tmp_path, [("a", {"json": b"{}"})])
    os.rename(tmp_path / "shard-000000.tar", tmp_path / "z.tar")
    shards.write_index(tmp_path / "z.tar")
    shards.write_shards(tmp_path, [("b", {"json": b"{}"}), ("a", {"json": b"{}"})])
    with pytest.raises(ValueError, match=r"z\.tar: document id 'a' occurs twice"):
        DocumentStore(tmp_path)


def test_what_is_no_document_is_left_out_and_said(tmp_path: Path):
    good = b'{"title": "t", "fields": {}}'
    shards.write_shards(tmp_path, [("a", {"png": b"x"}), ("b", {"json": good}), ("c", {"txt": b"x"})])
    for _ in range(2):  # built, and read
        with pytest.warns(UserWarning, match="left out: 2 x no member json"):
            store = DocumentStore(tmp_path)
        assert store.ids == ["b"]


def test_the_table_is_built_once_and_again_when_a_shard_changes(directory: Path, monkeypatch: pytest.MonkeyPatch):
    built = []

    def counting(*arguments: object, **options: object) -> DocumentTable:
        built.append(1)
        return build_table(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(kept_table, "build_table", counting)
    for _ in range(3):
        DocumentStore(directory)
    assert len(built) == 1
    (directory / FILE).write_bytes((directory / FILE).read_bytes()[:-9])  # cut off
    assert DocumentStore(directory).fetch([DOCUMENTS[-1].id]) == [DOCUMENTS[-1]] and len(built) == 2
    (directory / FILE).write_bytes(b"")
    DocumentStore(directory)
    assert len(built) == 3
    changed = [replace(d, title="new") for d in DOCUMENTS[:5]]
    old = DocumentStore(directory).fingerprint
    for path in directory.iterdir():
        if path.name != FILE:
            path.unlink()
    write_store(directory, changed)
    store = DocumentStore(directory)
    assert len(built) == 4 and store.fetch(store.ids) == changed and store.fingerprint != old
    tar = next(directory.glob("*.tar"))
    tar.write_bytes(tar.read_bytes().replace(b"new", b"odd"))  # without indexing it again
    with pytest.raises(ValueError, match="changed since its index was made"):
        DocumentStore(directory)


def test_a_store_rewritten_in_the_same_size_is_another(tmp_path: Path):
    """One fact is another now: every file has the size it had, and the id table is of before."""
    opened = []
    for capital in ("Lima", "Oslo"):
        write_store(tmp_path, [Document("a", "A", {"capital": capital}), Document("b", "B", {"capital": "Rome"})])
        store = DocumentStore(tmp_path)
        assert store.fetch(["a"])[0].fields == {"capital": capital}
        opened.append((store.fingerprint, [path.stat().st_size for path in sorted(tmp_path.iterdir())]))
    (first, before), (second, after) = opened
    assert first != second and before == after


def test_copied_shards_need_no_new_edits_but_a_new_table(directory: Path, tmp_path: Path):
    DocumentStore(directory).delete(DOCUMENTS[0].id)
    for path in directory.glob("*.tar"):
        os.utime(path, (1, 1))
    store = DocumentStore(directory)
    assert store.num_edits == 1 and len(store) == 29


def test_a_folder_that_cannot_be_written_to_is_read_and_said(directory: Path, tmp_path: Path, monkeypatch):
    def refuse(self: DocumentTable, path: Path) -> None:
        if path.parent == directory:
            raise PermissionError(13, "read-only file system")
        write(self, path)

    write = DocumentTable.write
    monkeypatch.setattr(DocumentTable, "write", refuse)
    with pytest.warns(UserWarning, match="cannot be written to"):
        assert_is(DocumentStore(directory), SlowTwin(directory))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            store = DocumentStore(directory, cache_dir=tmp_path / "cache")
            assert_is(store, SlowTwin(directory))
            store.close()
    assert len(list((tmp_path / "cache" / "tables").glob(f"*/{FILE}"))) == 1


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_ids_are_a_list_without_the_hidden(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory):
    table = open_table(Folder(_shared(tmp_path_factory)))
    names = [d.id for d in DOCUMENTS]
    hidden = data.draw(st.sets(st.sampled_from(names)))
    added = data.draw(st.lists(st.sampled_from(["x", "y", "z"]), unique=True))
    right = [name for name in names if name not in hidden] + added
    ids = DocumentIds(table, hidden=sorted(hidden), added=added)
    assert list(ids) == right and ids == right and len(ids) == len(right)
    assert [ids[i] for i in range(-len(right), len(right))] == right * 2
    part = slice(*data.draw(st.tuples(st.integers(-40, 40), st.integers(-40, 40), st.sampled_from([-3, -1, 1, 2]))))
    assert ids[part] == right[part]
    assert all((name in ids) == (name in right) for name in [*names, "x", "y", "z", "unknown"])
    assert ids != right[:-1] or not right
    with pytest.raises(IndexError):
        ids[len(right)]


def _shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.getbasetemp() / "shared-store"
    return directory if directory.exists() else write_store(directory, DOCUMENTS)


def test_the_file_is_the_same_each_time_and_mapped(directory: Path, tmp_path: Path):
    table = open_table(Folder(directory))
    table.write(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (directory / FILE).read_bytes()
    mapped = DocumentTable.open(tmp_path / "again")
    assert not any(array.flags.owndata for array in mapped.arrays.values())  # nothing is copied into memory
    assert mapped.shards == table.shards and mapped.fingerprint == table.fingerprint
    assert all(numpy.array_equal(mapped.arrays[name], table.arrays[name]) for name in table.arrays)
    assert [path.name for path in directory.iterdir() if "tmp" in path.name] == []


FORGED = {
    "deep": "[" * 100_000,
    "without data": '{"header": {}}',
    "a list": "[]",
    "an unknown array": '{"x": {"data_offsets": [0, 4], "shape": [1]}}',
}


@pytest.mark.parametrize("described", FORGED.values(), ids=FORGED)
def test_a_forged_table_is_one_mistake(described: str):
    with pytest.raises(ValueError, match="not a document table"):
        DocumentTable.from_buffer(len(described).to_bytes(8, "little") + described.encode())
