import json
from pathlib import Path

import pytest

from data import shards
from data.document_store import Document, DocumentStore, to_sample

DOCUMENTS = [
    Document(f"d{i:02d}", f"Title {i}", {"capital": f"City {i}", "code": f"c{i}"}, bytes([i]) * (i + 1))
    for i in range(30)
]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    shards.write_shards(tmp_path / "store", map(to_sample, DOCUMENTS), samples_per_shard=10)
    return tmp_path / "store"


def test_text_layout():
    assert DOCUMENTS[3].text == "Title 3\ncapital: City 3\ncode: c3\n"


def test_fetch_returns_what_was_written_in_the_order_asked(directory: Path):
    store = DocumentStore(directory)
    assert store.ids == [d.id for d in DOCUMENTS] and len(store) == 30
    ids = ["d25", "d03", "d25", "d11"]
    assert store.fetch(ids) == [DOCUMENTS[25], DOCUMENTS[3], DOCUMENTS[25], DOCUMENTS[11]]


def test_adjacent_documents_are_read_together_and_none_twice(directory: Path):
    store = DocumentStore(directory)
    store.fetch(["d04", "d02", "d03", "d03", "d20", "d08"])  # 2-4, 8, and 20 in another shard
    assert store.num_reads == 3
    store.fetch(["d02", "d08"])
    assert store.num_reads == 3


def test_runs_end_at_a_shard(directory: Path):
    store = DocumentStore(directory)
    assert [d.id for d in store.fetch(store.ids)] == store.ids
    assert store.num_reads == 3


def test_the_cache_is_bounded(directory: Path):
    store = DocumentStore(directory, cache_size=2)
    store.fetch(["d00", "d05"])
    store.fetch(["d09"])  # pushes d00 out
    store.fetch(["d05", "d09"])
    assert store.num_reads == 3
    store.fetch(["d00"])
    assert store.num_reads == 4


def test_unknown_id_is_named(directory: Path):
    with pytest.raises(KeyError, match="no document 'atlantis'"):
        DocumentStore(directory).fetch(["d00", "atlantis"])


def test_edit_lasts_and_leaves_the_shards_alone(directory: Path):
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    store = DocumentStore(directory)
    base = store.fingerprint
    assert store.version == f"{base[:12]}+0"
    store.fetch(["d07"])
    edited = store.edit("d07", "capital", "Neustadt")
    assert edited.text == "Title 7\ncapital: Neustadt\ncode: c7\n"
    assert store.fetch(["d07"]) == [edited]
    store.edit("d09", "code", "x: y")
    store.edit("d07", "capital", "Altstadt")
    again = DocumentStore(directory)
    assert again.fetch(["d07"])[0].fields == {"capital": "Altstadt", "code": "c7"}
    assert again.fetch(["d09"])[0].fields["code"] == "x: y"
    assert again.version == store.version == f"{base[:12]}+3"
    assert again.edited_ids_since(0) == ["d07", "d09"] and again.edited_ids_since(1) == ["d09", "d07"]
    assert again.edited_ids_since(3) == []
    assert all((directory / name).read_bytes() == data for name, data in before.items())


def test_an_edit_of_another_process_is_seen_after_refresh(directory: Path):
    one, other = DocumentStore(directory), DocumentStore(directory)
    one.fetch(["d01"])
    other.edit("d01", "code", "new")
    assert one.num_edits == 0
    one.edit("d02", "code", "newer")  # takes the other's in first
    assert one.num_edits == 2 and one.fetch(["d01"])[0].fields["code"] == "new"


def test_a_line_torn_by_a_crash_is_left_out_and_cut_off(directory: Path):
    store = DocumentStore(directory)
    store.edit("d01", "code", "kept")
    with (directory / "edits.jsonl").open("ab") as log:
        log.write(b'{"id": "d02", "fie')
    with pytest.warns(UserWarning, match="torn line"):
        again = DocumentStore(directory)
    assert again.num_edits == 1
    with pytest.warns(UserWarning, match="torn line"):
        again.edit("d03", "code", "after")
    lines = (directory / "edits.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["d01", "d03"]
    assert DocumentStore(directory).num_edits == 2


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("captial", "x", "did you mean 'capital'"),
        ("capital", "a\nb", "one non-empty line"),
        ("capital", "a\rb", "one non-empty line"),
        ("capital", "\ud800", "half a character"),
        ("code", " ", "line"),
    ],
)
def test_wrong_edits_are_refused_and_not_logged(directory: Path, field: str, value: str, message: str):
    store = DocumentStore(directory)
    with pytest.raises(ValueError, match=message):
        store.edit("d01", field, value)
    with pytest.raises(KeyError):
        store.edit("nowhere", "capital", "x")
    assert store.num_edits == 0 and not (directory / "edits.jsonl").exists()


def test_fingerprint_follows_the_contents(tmp_path: Path):
    def build(name: str, documents: list[Document]) -> str:
        shards.write_shards(tmp_path / name, map(to_sample, documents))
        return DocumentStore(tmp_path / name).fingerprint

    assert build("a", DOCUMENTS[:5]) == build("b", DOCUMENTS[:5]) != build("c", DOCUMENTS[:6])


def test_a_document_of_two_lines_is_refused():
    with pytest.raises(ValueError, match="one line of text"):
        Document("d", "t", {"capital": "a\nb"})


def test_a_malformed_document_is_named(tmp_path: Path):
    shards.write_shards(tmp_path, [("bad", {"json": b'{"title": "x"}'})])
    with pytest.raises(ValueError, match="document 'bad' is malformed"):
        DocumentStore(tmp_path).fetch(["bad"])
