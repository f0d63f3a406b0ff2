"""A store behind fsspec: the same documents, edits where files can be appended to, refusals that say so."""

import pickle
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from data.document_store import EDITS, DocumentStore
from data.document_table import FILE
from tests.data.stores import SlowTwin, assert_is, make_documents, to_memory, write_store

DOCUMENTS = make_documents()


class ObjectStore(MemoryFileSystem):  # type: ignore[misc]
    """Like an object store: whole objects are written, nothing is appended to."""

    protocol = "objects"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "a" in mode:
            raise NotImplementedError("no append")
        return super()._open(path, mode, **options)


fsspec.register_implementation("objects", ObjectStore, clobber=True)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_store(tmp_path / "store", DOCUMENTS)


@pytest.mark.parametrize("with_table", [True, False])
@pytest.mark.parametrize("scheme", ["memory", "objects", "file"])
def test_any_file_system_gives_the_same_documents(directory: Path, scheme: str, with_table: bool):
    twin, local = SlowTwin(directory), DocumentStore(directory)
    local.edit(DOCUMENTS[1].id, "code", "x")
    twin.edit(DOCUMENTS[1].id, "code", "x")
    if not with_table:
        (directory / FILE).unlink()
    url = f"file://{directory}" if scheme == "file" else to_memory(directory, f"{scheme}://any-{with_table}")
    store = DocumentStore(url, cache_size=3)
    assert_is(store, twin)
    assert store.version == local.version
    copy = pickle.loads(pickle.dumps(store))
    assert_is(copy, twin)


def test_edits_are_appended_where_that_is_possible(directory: Path):
    url = to_memory(directory, "memory://edited")
    store, twin = DocumentStore(url), SlowTwin(directory)
    for one in (store, twin):
        one.edit(DOCUMENTS[2].id, "code", "new")
        one.delete(DOCUMENTS[3].id)
        one.add(DOCUMENTS[3])
    assert_is(store, twin)
    assert_is(DocumentStore(url), twin)
    assert DocumentStore(url, at_edit=1).num_edits == 1
    filesystem, path = fsspec.core.url_to_fs(url)
    with filesystem.open(f"{path}/{EDITS}", "ab") as log:
        log.write(b'{"op": "de')
    with pytest.warns(UserWarning, match="torn line"):
        again = DocumentStore(url)
    with pytest.warns(UserWarning, match="torn line"), pytest.raises(ValueError, match="cannot cut off"):
        again.delete(DOCUMENTS[0].id)


def test_an_object_store_is_not_edited(directory: Path):
    store = DocumentStore(to_memory(directory, "objects://fixed"))
    with pytest.raises(ValueError, match=r"objects://fixed cannot be edited: objects has no appending"):
        store.edit(DOCUMENTS[2].id, "code", "new")
    assert store.num_edits == 0 and store.fetch([DOCUMENTS[2].id]) == [DOCUMENTS[2]]


def test_a_remote_store_says_what_is_missing(directory: Path):
    (directory / "shard-000001.index.safetensors").unlink()
    with pytest.raises(ValueError, match=r"shard-000001\.tar has no index .*data.shards index"):
        DocumentStore(to_memory(directory, "memory://without-index"))
    with pytest.raises(FileNotFoundError, match="holds no shards"):
        DocumentStore("memory://nothing-there")
    with pytest.raises(ValueError, match="nonsense://x cannot be read"):
        DocumentStore("nonsense://x")


def test_a_remote_shard_of_another_size_is_refused(directory: Path):
    DocumentStore(directory)
    url = to_memory(directory, "memory://shorter")
    filesystem, path = fsspec.core.url_to_fs(url)
    filesystem.pipe_file(f"{path}/shard-000000.tar", b"short")
    with pytest.raises(ValueError, match=r"shard-000000\.tar has 5 bytes but its index was made for"):
        DocumentStore(url)
