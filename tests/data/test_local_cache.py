"""Node-local copies: whole or not there, shared by processes, bounded, and never believed unseen."""

import hashlib
import io
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest

from data.document_store import DocumentStore
from data.local_cache import LocalCache, Source
from tests.data.stores import SlowTwin, assert_is, make_documents, to_memory, write_store

DOCUMENTS = make_documents()
MIB = 1 << 20


def source(data: bytes, opened: list[int] | None = None) -> Source:
    def open_it() -> io.BytesIO:
        if opened is not None:
            opened.append(1)
        return io.BytesIO(data)

    return Source(hashlib.sha256(data).hexdigest(), len(data), open_it)


def cache(folder: Path, store: str = "a" * 64, max_bytes: int = MIB) -> LocalCache:
    return LocalCache(folder, store=store, max_bytes=max_bytes)


def test_a_copy_is_made_once_and_found_again(tmp_path: Path):
    opened: list[int] = []
    one = source(b"x" * 1000, opened)
    first = cache(tmp_path)
    path = first.get(one)
    assert path is not None and path.read_bytes() == b"x" * 1000 and path.stem == one.sha256
    assert cache(tmp_path).get(one) == path and len(opened) == 1
    assert sorted(p.name for p in path.parent.iterdir()) == sorted([".in-use", path.name])


@pytest.mark.parametrize("damage", [b"", b"x" * 999, b"x" * 1001, b"y" * 1000], ids=["empty", "short", "long", "other"])
def test_a_damaged_or_foreign_copy_is_replaced(tmp_path: Path, damage: bytes):
    one = source(b"x" * 1000)
    path = cache(tmp_path).get(one)
    assert path is not None
    path.write_bytes(damage)
    again = cache(tmp_path)
    assert again.get(one) == path and path.read_bytes() == b"x" * 1000
    assert again.counts["replaced"] == 1 and again.counts["made"] == 1


def test_a_source_without_its_checksum_is_no_copy(tmp_path: Path):
    right = source(b"x" * 1000)
    for wrong in (b"y" * 1000, b"x" * 10, b"x" * 2000):
        with pytest.raises(ValueError, match="does not have the checksum"):
            cache(tmp_path).get(Source(right.sha256, right.size, lambda data=wrong: io.BytesIO(data)))  # type: ignore[misc]
        assert [p.name for p in (tmp_path / "shards" / ("a" * 32)).iterdir()] == [".in-use"]


def test_room_is_made_by_stores_that_nobody_reads_least_recently_used_first(tmp_path: Path):
    idle, busy, mine = (cache(tmp_path, store=letter * 64, max_bytes=3500) for letter in "ibm")
    sources = [source(bytes([n]) * 1000) for n in range(6)]
    paths = [c.get(s) for c, s in zip((idle, busy, idle), sources, strict=False)]
    for age, path in enumerate(paths):
        assert path is not None
        os.utime(path, (1000 - age,) * 2)  # the third was used longest ago
    assert mine.get(sources[3]) is None and mine.counts["room"] == 1  # all are in use
    idle.close()
    assert mine.get(sources[3]) is not None
    assert [path is not None and path.exists() for path in paths] == [True, True, False]
    assert mine.get(sources[4]) is not None
    assert [path is not None and path.exists() for path in paths] == [False, True, False]
    assert mine.get(sources[5]) is None  # its own copies stay: random reads would fetch them over and over
    assert mine.get(sources[3]) is not None and mine.counts == {"room": 2, "made": 2, "removed": 2, "found": 1}
    assert sum(p.stat().st_size for p in tmp_path.rglob("*.tar")) == 3000
    assert not list(tmp_path.rglob("*.tmp"))


def _copy(folder: str, name: str, started: object, opened: object) -> None:
    data = name.encode() * 100_000

    def open_it() -> io.BytesIO:
        opened.put(name)  # type: ignore[attr-defined]
        return io.BytesIO(data)

    started.wait()  # type: ignore[attr-defined]
    path = cache(Path(folder)).get(Source(hashlib.sha256(data).hexdigest(), len(data), open_it))
    assert path is not None and path.read_bytes() == data


def test_several_processes_make_each_copy_once(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    started, opened = context.Barrier(4), context.Queue()
    processes = [
        context.Process(target=_copy, args=(str(tmp_path), name, started, opened)) for name in ("a", "a", "b", "a")
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert sorted(opened.get() for _ in range(2)) == ["a", "b"] and opened.empty()


def _hang(folder: str, at: object) -> None:
    class Slow(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell():
                at.put("half")  # type: ignore[attr-defined]
                threading.Event().wait()
            return super().read(500)

    one = source(b"x" * 1000)
    cache(Path(folder)).get(Source(one.sha256, one.size, lambda: Slow(b"x" * 1000)))


def test_what_a_killed_process_left_is_taken_over(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    at = context.Queue()
    process = context.Process(target=_hang, args=(str(tmp_path), at))
    process.start()
    assert at.get() == "half" and list(tmp_path.rglob("*.tmp"))
    other = cache(tmp_path, store="b" * 64, max_bytes=1500)
    assert other.get(source(b"y" * 600)) is None  # its bytes are reserved
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert other.get(source(b"y" * 600)) is not None and not list(tmp_path.rglob("*.tmp"))
    path = cache(tmp_path).get(source(b"x" * 1000))
    assert path is not None and path.read_bytes() == b"x" * 1000


@pytest.mark.parametrize("where", ["local", "memory"])
def test_a_store_reads_from_its_copies(tmp_path: Path, where: str):
    directory = write_store(tmp_path / "store", DOCUMENTS)
    url = str(directory) if where == "local" else to_memory(directory, "memory://cached-store")
    store = DocumentStore(url, cache_dir=tmp_path / "cache")
    assert_is(store, SlowTwin(directory))
    assert store.copies is not None
    store.copies.wait()
    tars = sorted(hashlib.sha256(tar.read_bytes()).hexdigest() for tar in directory.glob("*.tar"))
    copies = list((tmp_path / "cache").rglob("*.tar"))
    assert sorted(copy.stem for copy in copies) == tars and store.copies.cache.counts == {"made": 3}
    again = DocumentStore(url, cache_dir=tmp_path / "cache", cache_size=0)
    again.fetch(again.ids)
    assert again.copies is not None
    again.copies.wait()
    assert again.copies.cache.counts == {"found": 3}
    for copy in copies:  # what is read now is the copy
        copy.write_bytes(copy.read_bytes().replace(b"Title", b"Copie"))
    assert {document.title.split()[0] for document in again.fetch(again.ids)} == {"Copie"}
    for copy in copies:  # and where somebody removes it, the source
        copy.unlink()
    again._reads._open.close()
    assert_is(again, SlowTwin(directory))
    store.close()
    again.close()


def test_a_store_without_room_reads_its_source_and_says_so(tmp_path: Path):
    directory = write_store(tmp_path / "store", DOCUMENTS)
    with pytest.warns(UserWarning, match="is full"):
        store = DocumentStore(directory, cache_dir=tmp_path / "cache", cache_dir_bytes=100)
        assert_is(store, SlowTwin(directory))
        assert store.copies is not None
        store.copies.wait()
    assert store.copies.cache.counts == {"room": 3}
    store.close()


def test_a_shard_that_lost_its_checksum_is_not_copied_and_that_is_said(tmp_path: Path):
    directory = write_store(tmp_path / "store", DOCUMENTS[:5])
    DocumentStore(directory)
    tar = next(directory.glob("*.tar"))
    stat = tar.stat()
    tar.write_bytes(tar.read_bytes().replace(b"Title", b"Titel"))
    os.utime(tar, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # so that only the copy can tell
    with pytest.warns(UserWarning, match="does not have the checksum"):
        store = DocumentStore(directory, cache_dir=tmp_path / "cache")
        store.fetch(store.ids)
        assert store.copies is not None
        store.copies.wait()
    assert list(store.copies.failed) == [0] and not list((tmp_path / "cache").rglob("*.tar"))
    store.close()


def test_a_child_of_fork_makes_copies_too(tmp_path: Path):
    directory = write_store(tmp_path / "store", DOCUMENTS)
    store = DocumentStore(directory, cache_dir=tmp_path / "cache")
    store.fetch([DOCUMENTS[0].id])
    assert store.copies is not None
    store.copies.wait()
    child = os.fork()
    if child == 0:
        try:
            store.fetch([DOCUMENTS[25].id])
            store.copies.wait()
            os._exit(0 if len(list((tmp_path / "cache").rglob("*.tar"))) == 2 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    store.close()
