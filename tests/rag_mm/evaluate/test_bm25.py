"""BM25 against its formula, written out; its rows."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

from data.dataset import Dataset
from data.document_store import Document, DocumentStore, to_sample
from data.shards import write_shards
from rag_mm.evaluate import baselines
from rag_mm.evaluate.answer import Answerer, Run
from retriever.bm25 import Bm25, words

TEXTS = {
    "a": "the red house of the king",
    "b": "a house, a house and a house",
    "c": "Königin, königlich; the sea",
    "d": "nothing shared here",
    "e": "nothing shared here",
}


@pytest.fixture
def store(tmp_path: Path) -> DocumentStore:
    documents = [Document(name, text, {}) for name, text in TEXTS.items()]
    write_shards(tmp_path / "documents", (to_sample(document) for document in documents))
    return DocumentStore(tmp_path / "documents")


def by_hand(question: str) -> dict[str, float]:
    """Lucene's BM25: idf ln(1 + (N - df + .5) / (df + .5)), times tf / (tf + k1 (1 - b + b len / mean))."""
    counted = {name: Counter(words(text)) for name, text in TEXTS.items()}
    lengths = {name: sum(count.values()) for name, count in counted.items()}
    mean = sum(lengths.values()) / len(lengths)
    scores = dict.fromkeys(TEXTS, 0.0)
    for word in words(question):
        df = sum(word in count for count in counted.values())
        for name, count in counted.items():
            idf = math.log(1 + (len(TEXTS) - df + 0.5) / (df + 0.5))
            tf = count[word]
            scores[name] += idf * tf / (tf + 1.5 * (1 - 0.75 + 0.75 * lengths[name] / mean)) if tf else 0.0
    return scores


@pytest.mark.parametrize(
    "question", ["which HOUSE of the king?", "house house", "the sea, königin", "unknown words only", "", "shared"]
)
def test_scores_are_the_formula(store: DocumentStore, question: str) -> None:
    (ids,), (scores,) = Bm25(store).search([question], k=5)
    expected = by_hand(question)
    assert scores == pytest.approx([expected[name] for name in ids], abs=1e-5)
    assert ids == sorted(expected, key=lambda name: (-round(expected[name], 6), name))  # ties by id


def test_what_a_question_must_not_find_is_left_out(store: DocumentStore) -> None:
    question = "house of the king"
    (whole,), (scores,) = Bm25(store).search([question], k=5)
    assert whole[0] == "a"
    ids, left = Bm25(store).search([question, question], k=4, forbidden=[("a", "nowhere"), ("d",)])
    assert ids == [[n for n in whole if n != "a"], [n for n in whole if n != "d"]]
    assert left[0] == [s for n, s in zip(whole, scores, strict=True) if n != "a"]
    with pytest.raises(ValueError, match="left with 4"):
        Bm25(store).search([question], k=5, forbidden=[("a",)])


def test_edits_count_and_k_has_a_limit(store: DocumentStore) -> None:
    store.add(Document("f", "a zebra", {"colour": "striped"}, passage="hooves"))
    found = Bm25(store)
    assert found.search(["zebra", "hooves", "striped"], k=1)[0] == [["f"], ["f"], ["a"]]  # fields are not searched
    with pytest.raises(ValueError, match="7 documents are asked for; the memory holds only 6"):
        Bm25(store).search(["x"], k=7)


def test_rows(run: Run, factbook: Dataset) -> None:
    samples = [s for s in factbook.questions("test") if s.kind == "name"][:6]
    alone = baselines.bm25(factbook, samples)
    assert all(p.answer is None and len(p.document_ids) == 4 for p in alone)
    found = sum(s.subject == p.document_ids[0] for s, p in zip(samples, alone, strict=True))
    assert found >= 4  # the name stands in the question and in one text
    read = Answerer(run.config, run.dataset, run.model, None).answer(samples, "bm25")
    for mine, theirs in zip(read, alone, strict=True):
        assert mine.document_ids == theirs.document_ids and mine.scores == pytest.approx(theirs.scores)
        assert mine.num_read == run.config.retriever.k and mine.answer is not None
