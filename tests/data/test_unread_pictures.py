"""Pictures that nobody wants are not read; the rest is what reading everything gives, in any order of asking."""

from __future__ import annotations

import dataclasses
import errno
import os
import pickle
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from data import images, shards
from data.dataset import Dataset
from data.document import Document, to_sample
from data.document_store import DocumentStore
from data.image_formats import Unread
from data.mixed_view import MixedView
from data.samples import Pair, Sample, to_members
from data.shard_set import MAX_SKIPPED, ShardSet
from tests.data.stores import make_documents, write_store
from tests.rag_mm.damaged_data import broken_picture, changed_copy

LARGE = 5000  # bytes, further than neighbours are joined over


def samples(count: int = 24) -> list[tuple[str, dict[str, bytes]]]:
    """The picture before the text (jpg), behind it, or none; another member that only looks like a picture."""
    found = []
    for i in range(count):
        members = {"json": b'{"n": %d}' % i, "seg.png": b"segments"}
        if i % 4 < 3:
            members[("png", "jpg", "webp")[i % 4]] = bytes([i + 1]) * LARGE
        found.append((f"s{i:03d}", members))
    return found


def sizes_read(reads: Any) -> list[int]:
    """Grows by the bytes of each range that is read from now on."""
    sizes, read = list[int](), reads.read

    def watched(ranges: Any) -> Any:
        sizes.extend(int(stop - start) for _, start, stop in ranges)
        return read(ranges)

    reads.read = watched
    return sizes


def test_one_that_was_not_read_says_so_and_survives_pickling():
    for picture in (Unread(), Unread("the shard has become shorter"), pickle.loads(pickle.dumps(Unread("late")))):
        with pytest.raises(images.ImageError, match=picture.reason):
            images.decode(picture, 8)
    assert pickle.loads(pickle.dumps(Unread("late"))).reason == "late"


@pytest.mark.parametrize("seed", range(5))
def test_shards_give_the_wanted_pictures_and_all_else(tmp_path: Path, seed: int):
    shards.write_shards(tmp_path, samples(), samples_per_shard=10)
    rng, whole, part = random.Random(seed), ShardSet(tmp_path), ShardSet(tmp_path)
    sizes = sizes_read(part.reads)
    for _ in range(10):
        positions = [rng.randrange(24) for _ in range(8)]
        wanted = [rng.random() < 0.5 for _ in positions]
        for found, expected, is_wanted in zip(
            part.read(positions, pictures=wanted), whole.read(positions), wanted, strict=True
        ):
            left = {name for name, data in found.members.items() if isinstance(data, Unread)}
            pictured = {"png", "jpg", "webp"} & expected.members.keys()
            assert left == (set() if is_wanted else pictured) and found.members.keys() == expected.members.keys()
            assert all(found.members[name] == expected.members[name] for name in expected.members.keys() - left)
        wanted_pictures = sum(w and i % 4 != 3 for i, w in zip(positions, wanted, strict=True))
        assert sizes.count(LARGE) == wanted_pictures
        sizes.clear()


def test_a_picture_alone_that_cannot_be_read_leaves_the_rest(tmp_path: Path):
    shards.write_shards(tmp_path, [("a", {"json": b"{}", "png": bytes(LARGE)})])
    opened = ShardSet(tmp_path)
    (tar,) = tmp_path.glob("*.tar")
    offset, _ = opened.indices[0].members(0)["png"]
    with tar.open("r+b") as file:
        file.truncate(offset + LARGE // 2)
    (found,) = opened.read([0], pictures=[True])
    assert found.problem is None and found.members["json"] == b"{}"
    picture = found.members["png"]
    assert isinstance(picture, Unread) and picture.reason == "the shard has become shorter"
    (strict,) = opened.read([0])
    assert strict.problem == "the shard has become shorter" and not strict.members


def test_read_ahead_without_pictures_covers_the_texts_and_skips_what_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    many = [(f"s{i}", {"json": b"{}", "png": bytes(MAX_SKIPPED * 2 if i % 5 == 0 else 100)}) for i in range(20)]
    shards.write_shards(tmp_path, many, samples_per_shard=12)
    opened, asked = ShardSet(tmp_path), list[tuple[int, int, int]]()
    monkeypatch.setattr(opened.reads, "will_need", lambda *one: asked.append(one))
    for positions in (range(20), range(3, 17), range(4, 5)):
        asked.clear()
        opened.will_need(positions, pictures=False)
        without, places = list(asked), [opened._place(i) for i in positions]
        for shard, row in places:
            offset, size = opened.indices[shard].members(row)["json"]
            assert any(s == shard and start <= offset and offset + size <= stop for s, start, stop in without)
        large = sum(i % 5 == 0 for i in positions)
        assert sum(stop - start for _, start, stop in without) < MAX_SKIPPED + 2000 * len(positions)
        assert len(without) <= len({shard for shard, _ in places}) + large
        asked.clear()
        opened.will_need(positions)
        assert len(asked) >= len({shard for shard, _ in places})
        assert sum(stop - start for _, start, stop in asked) >= large * MAX_SKIPPED * 2


@pytest.mark.parametrize("seed", range(5))
def test_a_store_gives_the_wanted_pictures_and_all_else(tmp_path: Path, seed: int):
    """Over what is kept, with edits and additions in between; the twin reads everything, and keeps nothing."""
    rng, documents = random.Random(seed), make_documents(40)
    documents = [
        dataclasses.replace(d, image=d.image and d.image * 20) if i % 2 else d for i, d in enumerate(documents)
    ]
    store = DocumentStore(write_store(tmp_path / "s", documents), cache_size=12, cache_bytes=40_000)
    twin = DocumentStore(tmp_path / "s", cache_size=0)
    for turn in range(60):
        if turn % 7 == 3:
            store.edit(rng.choice(documents).id, "capital", f"City of turn {turn}")
        if turn % 20 == 11:
            store.add(Document(f"added {turn}", "A", {"capital": "x"}, b"picture" * 100))
        if turn % 20 == 17:
            gone = documents.pop(rng.randrange(len(documents)))
            store.delete(gone.id)
            store.add(dataclasses.replace(gone, title="back", image=b"another picture"))
        twin.refresh()
        ids = rng.choices(list(store.ids), k=10)
        wanted = None if turn % 5 == 4 else {name for name in ids if rng.random() < 0.5}
        for found, expected in zip(store.read(ids, pictures=wanted), twin.fetch(ids), strict=True):
            if isinstance(found.image, Unread):
                assert wanted is not None and found.id not in wanted and expected.image is not None
                found = dataclasses.replace(found, image=expected.image)
            assert found == expected
        entries = store._cache
        sizes = [len(e) if isinstance(e, bytes) else len(e[0]) + len(e[1]) for e in entries.values()]
        assert store.num_cached == (len(sizes), sum(sizes)) and len(sizes) <= 12


def test_a_store_reads_no_bytes_of_pictures_that_are_not_wanted(tmp_path: Path):
    documents = [dataclasses.replace(d, image=bytes(LARGE)) for d in make_documents(20)]
    store = DocumentStore(write_store(tmp_path / "s", documents))
    sizes = sizes_read(store._reads)
    ids = [d.id for d in documents]
    store.read(ids, pictures=set(ids[:3]))
    assert sum(size > LARGE for size in sizes) == 3 and len(sizes) == 20
    sizes.clear()
    assert [type(d.image) for d in store.read(ids, pictures=())] == [bytes] * 3 + [Unread] * 17
    assert not sizes  # kept, with its picture or without
    assert [d.image for d in store.read(ids, pictures=set(ids[2:5]))][2:5] == [bytes(LARGE)] * 3
    assert len(sizes) == 2
    assert store.fetch(ids) == documents and len(sizes) == 2 + 15


def test_what_is_kept_without_its_picture_does_not_hide_that_it_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    documents = [dataclasses.replace(d, image=bytes(LARGE)) for d in make_documents(6)]
    store, ids = DocumentStore(write_store(tmp_path / "s", documents)), [d.id for d in documents]
    store.read(ids, pictures={ids[0]})
    twin = DocumentStore(tmp_path / "s", cache_size=0)
    failed = OSError(errno.EIO, os.strerror(errno.EIO))

    def fails(ranges: Any) -> Any:
        raise failed

    for one in (store, twin):
        monkeypatch.setattr(one._reads, "read", fails)
    expected = twin.read(ids)
    assert [d.problem for d in expected] == ["unreadable shard: Input/output error"] * 6
    assert store.read([*ids, ids[3]])[1:] == [*expected[1:], expected[3]] and store.read(ids[:1]) == documents[:1]
    assert [d.text for d in store.read(ids, pictures=())] == [d.text for d in documents]
    with pytest.raises(OSError, match="Input/output"):
        store.fetch(ids)


def test_threads_get_the_pictures_that_each_wants(tmp_path: Path):
    documents = make_documents(40)
    store = DocumentStore(write_store(tmp_path / "s", documents), cache_size=15, num_threads=4, max_open_files=2)
    right, wrong = {d.id: d for d in documents}, list[object]()

    def read(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(150):
            ids = rng.choices(list(right), k=8)
            wanted = {name for name in ids if rng.random() < 0.5}
            try:
                found = store.read(ids, pictures=wanted)
            except Exception as error:
                wrong.append(error)
                return
            for document in found:
                expected = right[document.id]
                if isinstance(document.image, Unread) and document.id not in wanted:
                    expected = dataclasses.replace(expected, image=document.image)
                if document != expected:
                    wrong.append(document)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    sizes = [len(e) if isinstance(e, bytes) else sum(map(len, e)) for e in store._cache.values()]
    assert store.num_cached == (len(sizes), sum(sizes))


def test_what_was_not_read_cannot_be_stored(tmp_path: Path):
    document = Document("a", "A", {}, Unread())
    store = DocumentStore(write_store(tmp_path / "s", make_documents(2)))
    for store_it in (store.add, to_sample):
        with pytest.raises(ValueError, match="not read cannot be stored"):
            store_it(document)
    for item in (Pair("a", "", Unread(), ()), Sample("a", "?", ("!",), "picture", "", "", (), Unread())):
        with pytest.raises(ValueError, match="not read cannot be stored"):
            to_members(item)
    assert store.num_edits == 0


def test_unlooked_a_sample_is_the_same_whatever_was_looked_at_before(factbook_dir: Path, tmp_path: Path):
    """Ranks look at different pictures and keep different samples; what a batch says must not depend on it."""
    pairs = {p.id for p in Dataset(factbook_dir).pairs("train") if p.image is not None}
    data = changed_copy(factbook_dir, tmp_path / "data", "pairs", pairs, broken_picture)
    places = range(12)
    fresh = Dataset(data).pairs("train").read_unlooked(places)
    looked = Dataset(data).pairs("train")
    emptied = looked.read(places)
    assert [p.weight for p in emptied] == [float(p.image is None) for p in fresh]
    before = looked.bad.num_bad
    assert looked.read_unlooked(places) == fresh and looked.bad.num_bad == before > 0
    assert looked.read(places) == emptied


def mixed(dataset: Dataset) -> Any:
    return MixedView({"a": dataset.questions("train"), "b": dataset.questions("dev")})


@pytest.mark.parametrize("make", [lambda d: d.questions("train"), lambda d: d.pairs("train"), mixed])
@pytest.mark.parametrize("seed", [0, 1])
def test_samples_have_the_wanted_pictures_and_all_else(
    factbook_dir: Path, monkeypatch: pytest.MonkeyPatch, make: Any, seed: int
):
    """Over what is kept of them, which is little, looked at or not."""
    monkeypatch.setattr("data.dataset.KEPT", 20)
    rng, view, whole = random.Random(seed), make(Dataset(factbook_dir)), list(make(Dataset(factbook_dir)))
    for turn in range(40):
        places = rng.choices(range(30), k=8)
        if turn % 4 == 3:
            assert view.read(places) == [whole[i] for i in places]
            continue
        wanted = [rng.random() < 0.5 for _ in places]
        taken = {i for i, is_wanted in zip(places, wanted, strict=True) if is_wanted}
        for i, found in zip(places, view.read_unlooked(places, pictures=wanted), strict=True):
            if isinstance(found.image, Unread):
                assert i not in taken and whole[i].image is not None
                found = dataclasses.replace(found, image=whole[i].image)
            assert found == whole[i]
        for one in getattr(view, "_views", [view]):
            assert one._kept_bytes == sum(read.num_bytes for read in one._kept.values()) and len(one._kept) <= 20
    assert all(isinstance(item.image, Unread) == (item.image is not None) for item in view.scan())
    assert [dataclasses.replace(s, image=None) for s in view.scan()] == [
        dataclasses.replace(s, image=None) for s in whole
    ]


def test_a_picture_of_no_bytes_is_broken_and_not_unread(tmp_path: Path):
    """What decides is the type, not that it is empty."""
    shards.write_shards(tmp_path, [("a", {"json": b"{}", "png": b""})])
    (found,) = ShardSet(tmp_path).read([0], pictures=[True])
    assert found.members["png"] == b"" and not isinstance(found.members["png"], Unread)
    with pytest.raises(images.ImageError, match="not an image"):
        images.decode(found.members["png"], 8)
