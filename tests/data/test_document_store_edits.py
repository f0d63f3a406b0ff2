"""Edits, additions and deletions: durable, in one order for all writers, readable as of any of them."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from data.document import Document
from data.document_store import EDITS, DocumentStore
from tests.data.stores import SlowTwin, assert_is, make_documents, write_store

DOCUMENTS = make_documents()
NEW = Document("neu/1", "Neu", {"capital": "Stadt", "code": "x"}, b"picture", {"a": [1]}, "two\nlines")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_store(tmp_path / "store", DOCUMENTS)


def test_an_added_document_is_there_for_everybody_who_opens(directory: Path):
    store = DocumentStore(directory)
    store.add(NEW)
    store.edit("neu/1", "code", "y")
    for one in (store, DocumentStore(directory)):
        got = one.fetch(["neu/1", DOCUMENTS[3].id])
        assert got[0] == replace(NEW, fields={"capital": "Stadt", "code": "y"})
        assert got[1] == DOCUMENTS[3] and "neu/1" in one and len(one) == 31 and one.ids[-1] == "neu/1"
        assert one.version.endswith("+2")
    with pytest.raises(ValueError, match="'neu/1' exists already; edit it, or delete it first"):
        store.add(NEW)
    with pytest.raises(ValueError, match="exists already"):
        store.add(DOCUMENTS[0])
    assert store.num_edits == 2


def test_a_deleted_document_is_refused_by_the_number_of_its_edit(directory: Path):
    store, name = DocumentStore(directory), DOCUMENTS[4].id
    store.fetch([name])  # also when it is cached
    store.edit(name, "code", "z")
    store.delete(name)
    for one in (store, DocumentStore(directory)):
        with pytest.raises(KeyError, match=f"'{name}' .* was deleted by edit 2"):
            one.fetch([DOCUMENTS[0].id, name])
        assert name not in one and name not in one.ids and len(one) == len(one.ids) == 29
        assert one.ids[4] == DOCUMENTS[5].id and one.ids[-1] == DOCUMENTS[-1].id
        assert one.ids[2:6] == [DOCUMENTS[i].id for i in (2, 3, 5, 6)]
    for change in (lambda: store.delete(name), lambda: store.edit(name, "code", "y")):
        with pytest.raises(KeyError, match="was deleted by edit 2"):
            change()
    again = Document(name, "Again", {"code": "new"})
    store.add(again)  # what the old one had is forgotten
    assert store.fetch([name]) == DocumentStore(directory).fetch([name]) == [again] and store.ids[-1] == name
    assert store.edited_ids_since(0) == [name] and store.num_edits == 3


def test_edited_ids_since_covers_every_kind(directory: Path):
    store = DocumentStore(directory)
    store.edit(DOCUMENTS[1].id, "code", "a")
    store.add(NEW)
    store.delete(DOCUMENTS[2].id)
    assert store.edited_ids_since(0) == [DOCUMENTS[1].id, "neu/1", DOCUMENTS[2].id]
    assert store.edited_ids_since(1) == ["neu/1", DOCUMENTS[2].id] and store.edited_ids_since(3) == []
    with pytest.raises(ValueError, match="num_edits is 4; this store has 3"):
        store.edited_ids_since(4)


def test_a_store_is_read_as_of_an_edit(directory: Path):
    store = DocumentStore(directory)
    twins = [SlowTwin(directory)]
    changes = [
        ("edit", DOCUMENTS[1].id, "code", "a"), ("delete", DOCUMENTS[2].id), ("add", NEW),
        ("edit", "neu/1", "code", "b"), ("delete", "neu/1"),
    ]  # fmt: skip
    for number, (change, *arguments) in enumerate(changes, 1):
        getattr(store, change)(*arguments)
        twin = SlowTwin(directory)
        for earlier, *given in changes[:number]:
            getattr(twin, earlier)(*given)
        twins.append(twin)
    for number, twin in enumerate(twins):
        then = DocumentStore(directory, at_edit=number)
        assert_is(then, twin)
        assert then.num_edits == number
        then.refresh()  # stays where it is
        assert then.num_edits == number
    with pytest.raises(ValueError, match="opened at edit 2; open it without at_edit"):
        DocumentStore(directory, at_edit=2).delete(DOCUMENTS[0].id)
    with pytest.raises(ValueError, match=f"at_edit is 6; .*{EDITS} has 5 edits"):
        DocumentStore(directory, at_edit=6)


class Changes(RuleBasedStateMachine):
    """Any sequence of changes and reads, through two stores that are open at a time, is what the twin does."""

    directory: Path
    names = st.sampled_from([*(document.id for document in DOCUMENTS[:6]), "new1", "new2"])

    def __init__(self) -> None:
        super().__init__()
        (self.directory / EDITS).unlink(missing_ok=True)
        self.twin = SlowTwin(self.directory)
        self.stores = [DocumentStore(self.directory, cache_size=4), DocumentStore(self.directory, cache_bytes=2000)]

    def change(self, which: int, name: str, change: str, *arguments: object) -> None:
        exists = name in self.twin.documents
        if exists == (change != "add"):
            getattr(self.stores[which], change)(*arguments)
            getattr(self.twin, change)(*arguments)
        else:
            with pytest.raises((KeyError, ValueError)):
                getattr(self.stores[which], change)(*arguments)

    @rule(which=st.integers(0, 1), name=names, field=st.sampled_from(["code", "capital"]), value=st.integers(0, 99))
    def edit(self, which: int, name: str, field: str, value: int) -> None:
        self.change(which, name, "edit", name, field, f"v{value}")

    @rule(which=st.integers(0, 1), name=names, image=st.none() | st.binary(min_size=1, max_size=40))
    def add(self, which: int, name: str, image: bytes | None) -> None:
        self.change(which, name, "add", Document(name, "T", {"code": "1", "capital": "2"}, image, {}, "p\nq"))

    @rule(which=st.integers(0, 1), name=names)
    def delete(self, which: int, name: str) -> None:
        self.change(which, name, "delete", name)

    @rule(which=st.integers(0, 1), names=st.lists(names, max_size=9))
    def fetch(self, which: int, names: list[str]) -> None:
        self.stores[which].refresh()
        wanted = [name for name in names if name in self.twin.documents]
        assert self.stores[which].fetch(wanted) == [self.twin.documents[name] for name in wanted]
        for name in set(names) - set(wanted):
            with pytest.raises(KeyError):
                self.stores[which].fetch([*wanted, name])

    @rule(which=st.integers(0, 1))
    def reopen(self, which: int) -> None:
        self.stores[which] = DocumentStore(self.directory, cache_size=3)

    @invariant()
    def same(self) -> None:
        for store in self.stores:
            store.refresh()
            assert store.num_cached[0] <= 4 or store.num_cached[1] <= 2000
        assert {name for name in self.stores[0].ids} == set(self.twin.documents)

    def teardown(self) -> None:
        for store in (*self.stores, DocumentStore(self.directory)):
            store.refresh()
            assert sorted(store.ids) == sorted(self.twin.documents)
            assert store.fetch(sorted(store.ids)) == [self.twin.documents[name] for name in sorted(store.ids)]


def test_any_order_of_changes_and_reads_is_the_twins(directory: Path):
    Changes.directory = directory
    run_state_machine_as_test(
        Changes,
        settings=settings(
            max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize("cut", ["a quarter", "half", "all but the newline"])
def test_a_torn_line_never_happened_whatever_its_kind(directory: Path, cut: str):
    DocumentStore(directory).add(NEW)
    whole = (directory / EDITS).read_bytes()
    length = {"a quarter": len(whole) // 4, "half": len(whole) // 2, "all but the newline": len(whole) - 1}[cut]
    DocumentStore(directory).delete(DOCUMENTS[0].id)
    kept = (directory / EDITS).read_bytes()
    (directory / EDITS).write_bytes(kept + whole[:length])
    with pytest.warns(UserWarning, match="torn line"):
        store = DocumentStore(directory)
    assert store.num_edits == 2
    with pytest.warns(UserWarning, match="torn line"):
        store.delete(DOCUMENTS[1].id)
    assert (directory / EDITS).read_bytes().startswith(kept) and DocumentStore(directory).num_edits == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "edit 1 is malformed: Expecting"),
        ('{"op": "edit", "id": "nowhere", "field": "code", "value": "x"}', "edit 1 .* 'nowhere' does not exist"),
        ('{"op": "add", "id": "q/0", "title": "t", "fields": {}, "image": null}', "'q/0' exists already"),
        ('{"op": "move", "id": "q/0"}', "op is 'move'; allowed are edit, add and delete"),
        ('{"op": "delete"}', "edit 1 is malformed: no 'id'"),
        ("[1]", "edit 1 is malformed"),
        ("null", "edit 1 is malformed"),
        ("[" * 100_000, "edit 1 is malformed"),
        ('{"op": "delete", "id": "q/0", "base": "00"}', "made on shards of fingerprint 00"),
        ('{"op": "edit", "id": "q/0", "field": "code", "value": 3}', "value 3"),
    ],
)
def test_a_malformed_line_is_named(directory: Path, line: str, message: str):
    (directory / EDITS).write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        DocumentStore(directory)


def test_a_log_from_before_additions_is_read(directory: Path):
    (directory / EDITS).write_text('{"id": "q/0", "field": "code", "value": "x"}\n')
    assert DocumentStore(directory).fetch(["q/0"])[0].fields["code"] == "x"


WRITER = """
import sys
from data.document import Document
from data.document_store import DocumentStore
directory, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = DocumentStore(directory)
print("ready", flush=True)
for i in range(count):
    store.add(Document(f"{name}-{i}", "T" * 500, {"code": str(i)}, bytes(range(256)) * 40))
    print(i, flush=True)
"""


def writer(directory: Path, name: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(directory), name, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def test_what_was_acknowledged_outlives_kill_9(directory: Path):
    process = writer(directory, "w", 100_000)
    assert process.stdout is not None
    acknowledged = -1
    for line in process.stdout:
        if line.strip().isdigit():
            acknowledged = int(line)
            if acknowledged == 25:
                process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    with pytest.warns(UserWarning) if not (directory / EDITS).read_bytes().endswith(b"\n") else nullcontext():
        store = DocumentStore(directory)
    assert acknowledged >= 25 and acknowledged + 1 <= store.num_edits <= acknowledged + 2
    names = [f"w-{i}" for i in range(acknowledged + 1)]
    assert [document.fields["code"] for document in store.fetch(names)] == [str(i) for i in range(len(names))]
    store.delete("w-0")  # and the next writer goes on


def test_writers_of_several_processes_and_threads_lose_nothing(directory: Path):
    processes = [writer(directory, name, 20) for name in ("a", "b")]
    store, failed = DocumentStore(directory), []

    def work(name: str) -> None:
        try:
            for i in range(20):
                store.add(Document(f"{name}-{i}", "T", {"code": str(i)}))
                store.fetch([f"{name}-{i}", DOCUMENTS[i].id])
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("c", "d")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    assert not failed
    lines = [json.loads(line) for line in (directory / EDITS).read_text().splitlines()]
    assert len(lines) == 80 and DocumentStore(directory).num_edits == 80
    for name in "abcd":  # each writer's in its order
        assert [line["id"] for line in lines if line["id"][0] == name] == [f"{name}-{i}" for i in range(20)]


def test_a_file_system_without_locks_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch):
    store = DocumentStore(directory)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ValueError, match=r"no locks .*Lustre: -o flock"):
        store.delete(DOCUMENTS[0].id)
    assert store.num_edits == 0 and DocumentStore(directory).fetch([DOCUMENTS[0].id]) == [DOCUMENTS[0]]


def test_a_full_disk_leaves_no_half_line(directory: Path, monkeypatch: pytest.MonkeyPatch):
    store = DocumentStore(directory)
    store.delete(DOCUMENTS[0].id)
    before, write = (directory / EDITS).read_bytes(), os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) < 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            store.delete(DOCUMENTS[1].id)
    assert (directory / EDITS).read_bytes() == before and store.num_edits == 1
    store.delete(DOCUMENTS[1].id)
    assert DocumentStore(directory).num_edits == 2
