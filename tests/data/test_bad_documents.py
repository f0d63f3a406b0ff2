"""Documents that are damaged in their store: read as empty ones, counted once, by reason and shard."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy
import pytest

from data.bad_documents import BadDocuments
from data.document import Document
from data.document_store import DocumentStore
from data.random_reads import RandomReads
from data.shards import write_shards
from tests.data.stores import make_documents, write_store

DOCUMENTS = make_documents(30)
GOOD = b'{"title": "T", "fields": {"a": "b"}, "meta": {}}'


def damaged(name: str, problem: str) -> Document:
    return Document(name, "", {}, problem=problem)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"{", "json: malformed"),
        (b'{"title": "\xff", "fields": {}}', "json: not UTF-8"),
        (b'{"title": "\\ud800", "fields": {}}', "json: half a surrogate pair"),
        (b'{"a":' * 100_000, "json: nests too deeply"),
        (b"[1]", "json: not a document's"),
        (b"null", "json: not a document's"),
        (b'{"fields": {}}', "json: not a document's"),
        (b'{"title": "two\\nlines", "fields": {}}', "json: not a document's"),
        (b'{"title": "T", "fields": {"a": 1}}', "json: not a document's"),
        (b'{"title": "T", "fields": {}, "passage": 1}', "json: not a document's"),
        (b"", "json: malformed"),
    ],
)
def test_what_is_no_document_is_an_empty_one(tmp_path: Path, body: bytes, problem: str):
    samples = [("a", {"json": GOOD}), ("b", {"json": body, "png": b"x"}), ("c", {"json": GOOD, "png": b"y"})]
    write_shards(tmp_path, samples, samples_per_shard=2)
    store = DocumentStore(tmp_path)
    for _ in range(2):  # also from the cache
        found = store.read(["c", "b", "a", "b"])
        assert found == [
            Document("c", "T", {"a": "b"}, b"y"),
            damaged("b", problem),
            Document("a", "T", {"a": "b"}),
            damaged("b", problem),
        ]
        assert store.bad.num_read == 3 and store.bad.reasons == {problem: 1} and store.bad.found == {"b": problem}
        assert store.bad.shards == {tmp_path / "shard-000000.tar": 1}
        with pytest.raises(ValueError, match="document 'b' is malformed"):
            store.fetch(["a", "b"])


@pytest.mark.parametrize("max_gap", [0, 1 << 20])
def test_a_shard_that_becomes_shorter_costs_what_it_held(tmp_path: Path, max_gap: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("data.random_reads.MAX_GAP", max_gap)
    write_store(tmp_path, DOCUMENTS)
    store, names = DocumentStore(tmp_path), [d.id for d in DOCUMENTS]
    ends = [int(store._table.places(store._table.find([name]))[0][0, 2]) for name in names[10:20]]
    os.truncate(tmp_path / "shard-000001.tar", ends[4] - 1)
    lost = set(names[14:20])
    expected = [damaged(d.id, "the shard has become shorter") if d.id in lost else d for d in DOCUMENTS]
    assert store.read(names) == expected
    assert store.bad.reasons == {"the shard has become shorter": 6} and store.bad.num_read == 30
    assert "the most, 6, are in " + str(tmp_path / "shard-000001.tar") in (store.bad.complaint(0.1) or "")
    assert store.bad.complaint(0.2) is None


def test_a_disk_that_fails_costs_what_lies_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_store(tmp_path, DOCUMENTS)
    store, whole = DocumentStore(tmp_path), RandomReads.read

    def read(self, ranges):
        if (numpy.asarray(ranges)[:, 0] == 2).any():
            raise OSError(errno.EIO, "Input/output error")
        return whole(self, ranges)

    monkeypatch.setattr(RandomReads, "read", read)
    names = [d.id for d in DOCUMENTS]
    found = store.read(names)
    assert found[:20] == DOCUMENTS[:20]
    assert found[20:] == [damaged(name, "unreadable shard: Input/output error") for name in names[20:]]
    monkeypatch.undo()
    assert store.read(names) == DOCUMENTS  # what failed was not kept
    assert store.bad.num_bad == 10 and store.bad.num_read == 30


def test_edits_of_a_damaged_document_do_not_revive_it_and_added_ones_count(tmp_path: Path):
    write_shards(tmp_path, [("a", {"json": GOOD}), ("b", {"json": GOOD})])
    store = DocumentStore(tmp_path)
    store.edit("b", "a", "new")
    store.add(Document("c", "C", {}, b"x"))
    tar = tmp_path / "shard-000000.tar"
    os.truncate(tar, int(store._table.places(store._table.find(["b"]))[0][0, 1]))
    store.close()
    store._cache.clear()
    changed = "unreadable shard: changed since it was opened first"
    assert store.read(["b", "c"]) == [damaged("b", changed), Document("c", "C", {}, b"x")]
    store.condemn("c", "not an image")
    assert store.bad.num_read == 2 and store.bad.found == {
        "b": changed,
        "c": "not an image",
    }
    assert store.bad.shards == {tar: 1, tmp_path / "edits.jsonl": 1}


def test_counting_is_once_a_document_whatever_is_read():
    bad, twin = BadDocuments("documents", total=50), set[int]()
    draw = numpy.random.default_rng(0)
    for _ in range(40):
        positions = draw.integers(0, 70, size=draw.integers(0, 9))  # some were added since
        bad.count(positions)
        twin |= set(positions.tolist())
        if len(positions):
            bad.record(int(positions[0]), "broken", key=str(positions[0]), shard=Path("a.tar"))
        assert bad.num_read == len(twin) and bad.num_bad == len(bad.found) <= len(twin)
    bad.count_all()
    assert bad.num_read == bad._total
