from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.document_store import Document, DocumentStore, to_sample
from data.image_formats import extension_of, picture_member
from data.sample_ids import MAX_LENGTH, from_key, to_key
from data.samples import Pair, Sample, read_pair, read_question, to_members
from data.shards import split_key, write_shards
from tests.data.formats.examples import picture

IDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


@given(IDS)
def test_any_id_is_a_key_and_comes_back(sample_id: str):
    key = to_key(sample_id)
    assert from_key(key) == sample_id
    assert split_key(f"{key}.json") == (key, "json")  # safe: no dots, no folders, nothing that leads out
    assert "/" not in key and "." not in key


@given(st.sets(IDS, min_size=2, max_size=5))
def test_different_ids_have_different_keys(ids: set[str]):
    assert len({to_key(i) for i in ids}) == len(ids)


def test_ids_that_are_none():
    for bad, message in (("", "empty"), ("x" * (MAX_LENGTH + 1), "at most"), ("\ud800", "half a character")):
        with pytest.raises(ValueError, match=message):
            to_key(bad)
    assert to_key("np-capital-name") == "np-capital-name" and to_key("10.1/b%") == "10%2E1%2Fb%25"


def test_documents_of_any_id_and_length_are_stored(tmp_path: Path):
    """Long and foreign names need more than the oldest tar format has; other tools still read them."""
    documents = [
        Document(name, "T", {}, None, {"n": i}, f"passage {i}\nof two lines")
        for i, name in enumerate(["https://x.org/a?b=c#1", "../../etc/passwd", "東京", "y" * 400, "a.b", "a%2Eb"])
    ]
    write_shards(tmp_path / "documents", map(to_sample, documents))
    store = DocumentStore(tmp_path / "documents")
    assert store.ids == [d.id for d in documents] and store.fetch([d.id for d in documents][::-1]) == documents[::-1]
    assert "a.b" in store and "nobody" not in store
    with tarfile.open(next((tmp_path / "documents").glob("*.tar"))) as archive:
        assert all(not name.startswith(("/", ".")) for name in archive.getnames())


QUESTIONS = st.builds(
    Sample,
    id=IDS, question=st.text(max_size=9), answers=st.lists(st.text(), max_size=3).map(tuple),
    kind=st.just("picture"), field=st.text(max_size=3), subject=st.text(max_size=3),
    gold=st.lists(IDS, max_size=3).map(tuple),
    image=st.just(picture(1)), hard_negatives=st.lists(IDS, max_size=2).map(tuple),
    forbidden=st.lists(IDS, max_size=2).map(tuple),
    meta=st.dictionaries(st.text(max_size=3), st.integers() | st.none() | st.lists(st.text(max_size=2)), max_size=2),
)  # fmt: skip


@given(QUESTIONS)
def test_a_question_comes_back(sample: Sample):
    found = read_question(*to_members(sample))
    assert found.weight == (1.0 if sample.answers else 0.0)
    assert (found.question, found.answers, found.gold) == (sample.question, sample.answers, sample.gold)
    assert (found.id, found.field, found.subject, found.image) == (
        sample.id,
        sample.field,
        sample.subject,
        sample.image,
    )
    assert found.hard_negatives == sample.hard_negatives and found.meta == sample.meta
    assert found.forbidden == sample.forbidden


def test_a_pair_comes_back():
    pair = Pair("p/1", "text", None, ("a", "b"), hard_negatives=("c",), meta={"x": [1]})
    assert read_pair(*to_members(pair)) == pair and read_pair(*to_members(pair)).meta == {"x": [1]}


KINDS = {"PNG": "png", "JPEG": "jpg", "WEBP": "webp", "GIF": "gif", "BMP": "bmp", "TIFF": "tiff"}


@pytest.mark.parametrize(("kind", "extension"), KINDS.items())
def test_the_bytes_say_what_a_picture_is(kind: str, extension: str):
    data = picture(1, kind)
    assert extension_of(data) == extension
    assert to_sample(Document("d", "", {}, data))[1][extension] is data
    assert picture_member({"json": b"{}", extension: data}) is data
    assert extension_of(b"RIFF????WAVE") is None and picture_member({"txt": b""}) is None
    assert extension_of(io.BytesIO(data).read(3) + b"x" * 9) == (extension if extension in ("jpg", "bmp") else None)
