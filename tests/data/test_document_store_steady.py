"""Threads, forks and a million reads: the same documents, and neither memory nor open files grow."""

import os
import random
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.document import Document
from data.document_store import DocumentStore
from tests.data.stores import SlowTwin, make_documents, write_store

DOCUMENTS = make_documents()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("steady") / "store", DOCUMENTS, samples_per_shard=4)


@pytest.mark.parametrize("nowait", [True, False])
def test_any_sequence_of_fetches_is_the_twins(directory: Path, nowait: bool):
    twin = SlowTwin(directory)
    names = st.sampled_from([d.id for d in DOCUMENTS])

    @settings(deadline=None, max_examples=40)
    @given(
        st.lists(st.lists(names, max_size=30), max_size=8), st.integers(0, 12), st.integers(0, 9000), st.integers(1, 3)
    )
    def check(batches: list[list[str]], cache_size: int, cache_bytes: int, max_open_files: int) -> None:
        store = DocumentStore(
            directory, cache_size=cache_size, cache_bytes=cache_bytes, max_open_files=max_open_files, num_threads=2
        )
        if not nowait:
            store._reads._nowait = None  # every read through threads
        for batch in batches:
            assert store.fetch(batch) == [twin.documents[name] for name in batch]
            cached, num_bytes = store.num_cached
            assert cached <= cache_size and num_bytes <= cache_bytes and store._reads.num_open <= max_open_files
        kept = store._cache
        assert store.num_cached[1] == sum(len(e) if isinstance(e, bytes) else sum(map(len, e)) for e in kept.values())
        store.close()

    check()


def test_threads_fetch_and_edit_at_a_time(directory: Path, tmp_path: Path):
    own = write_store(tmp_path / "own", DOCUMENTS, samples_per_shard=4)
    store = DocumentStore(own, cache_size=10, max_open_files=2, num_threads=4)
    right = {d.id: d for d in DOCUMENTS}
    wrong: list[object] = []

    def fetch(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(150):
            names = draw.choices([d.id for d in DOCUMENTS[1:]], k=12)
            try:
                found = store.fetch(names)
            except Exception as error:
                wrong.append(error)
                return
            wrong.extend(a for a, name in zip(found, names, strict=True) if a != right[name])

    def edit() -> None:
        for i in range(60):
            store.edit(DOCUMENTS[0].id, "code", str(i))
            store.add(Document(f"new{i}", "T", {"n": str(i)}))
            if store.fetch([DOCUMENTS[0].id, f"new{i}"])[0].fields["code"] != str(i):
                wrong.append(i)
            store.delete(f"new{i}")

    threads = [*(threading.Thread(target=fetch, args=(seed,)) for seed in range(4)), threading.Thread(target=edit)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and store.num_edits == 180


def test_an_edit_during_a_fetch_is_not_hidden_by_the_cache(tmp_path: Path):
    store = DocumentStore(write_store(tmp_path / "store", DOCUMENTS))
    name, read = DOCUMENTS[0].id, store._reads.read

    def read_and_change(ranges):  # between the look-up of the place and the end of the read
        store._reads.read = read  # type: ignore[method-assign]
        parts = read(ranges)
        store.delete(name)
        store.add(Document(name, "new", {}))
        return parts

    store._reads.read = read_and_change  # type: ignore[method-assign]
    assert store.fetch([name]) == [DOCUMENTS[0]]  # as of the edit at which it began
    assert store.fetch([name]) == [Document(name, "new", {})]


def test_a_child_of_fork_reads_the_same(directory: Path):
    store = DocumentStore(directory, max_open_files=2, num_threads=2)
    names = [d.id for d in DOCUMENTS]
    assert store.fetch(names[:9]) == DOCUMENTS[:9]
    locked = store._lock
    locked.acquire()  # as if another thread were fetching at the fork
    child = os.fork()
    if child == 0:
        try:
            thread = threading.Thread(target=lambda: os._exit(0 if store.fetch(names) == DOCUMENTS else 1))
            thread.start()
            thread.join(60)
        finally:
            os._exit(2)
    locked.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.fetch(names) == DOCUMENTS


@pytest.mark.slow
def test_memory_and_open_files_are_flat_over_a_million_reads(tmp_path: Path):
    documents = [Document(f"{i}", f"T{i}", {"n": "x" * 300}) for i in range(50_000)]
    directory = write_store(tmp_path / "store", documents, samples_per_shard=500)  # 100 shards
    store = DocumentStore(directory, cache_size=1000, max_open_files=16, num_threads=4)
    draw = random.Random(0)

    def anonymous_bytes() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    def read(count: int) -> int:
        most = 0
        for _ in range(count // 500):
            names = [str(draw.randrange(50_000)) for _ in range(500)]
            found = store.fetch(names)
            assert found[0].id == names[0] and found[-1].title == f"T{names[-1]}"
            most = max(most, len(os.listdir("/proc/self/fd")))
        return most

    before = len(os.listdir("/proc/self/fd"))
    read(100_000)
    settled = anonymous_bytes()
    most = read(1_000_000)
    assert store.num_reads > 1_000_000
    assert most <= before + 17  # 16 shards, and the listing itself
    assert anonymous_bytes() - settled < 8 << 20
