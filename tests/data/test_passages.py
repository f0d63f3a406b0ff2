from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.document_store import Document
from data.passages import Chunking, cut, split


@given(st.text(st.sampled_from("ab \n\t"), max_size=80), st.integers(1, 9), st.data())
def test_passages_hold_every_word_in_order(text: str, words: int, data: st.DataObject):
    overlap = data.draw(st.integers(0, words - 1))
    passages = split(text, Chunking(words, overlap))
    assert all(passage in text for passage in passages)  # what lies between words stays
    found: list[str] = []
    for i, passage in enumerate(passages):
        own = passage.split()
        assert len(own) <= words and (len(own) == words or i == len(passages) - 1)
        if i:
            assert own[:overlap] == found[len(found) - overlap :] and len(own) > overlap
        found += own[overlap if i else 0 :]
    assert found == text.split()


def test_a_document_that_stays_whole_is_itself():
    document = Document("d", "T", {}, passage="a b c")
    assert list(cut(document, Chunking())) == [document]


def test_passages_of_a_document():
    document = Document("d", "T", {"section": "S"}, b"picture", {"url": "u"}, "one two\nthree four five")
    first, second, third = cut(document, Chunking(2))
    assert (first.id, first.text) == ("d#0", "T\nsection: S\none two\n") and first.image == b"picture"
    assert (second.id, second.passage, second.image) == ("d#1", "three four", None)
    assert first.meta == {"document": "d", "passage": 0, "url": "u"} and third.meta == {"document": "d", "passage": 2}
    assert [d.passage for d in cut(Document("e", "", {}), Chunking(2))] == [""]


@pytest.mark.parametrize("words, overlap", [(-1, 0), (3, 3), (0, 1), (3, -1)])
def test_what_cannot_be_cut(words: int, overlap: int):
    with pytest.raises(ValueError, match=r"--(passage-words|overlap) is "):
        Chunking(words, overlap)
