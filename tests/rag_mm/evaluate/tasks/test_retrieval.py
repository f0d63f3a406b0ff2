"""TREC, BEIR and jsonl files end to end."""

from pathlib import Path

import pytest

from data.dataset import Pair, Sample
from rag_mm.evaluate.prediction_files import FileError
from rag_mm.evaluate.tasks.retrieval import Judgements, Retrieval
from tests.rag_mm.evaluate.tasks.files import score, write

QRELS = "q1 0 a 1\nq1 0 b 0\nq2 0 c 2\n"
RUN = "q1 Q0 b 1 2.0 tag\nq1 Q0 a 2 1.0 tag\nq2 Q0 c 9 0.5 tag\n"  # the rank column is not used
TASK = Retrieval(k=(1, 2))
EXPECTED = {"mrr": 0.75, "map": 0.75, "hit@1": 0.5, "recall@1": 0.5, "hit@2": 1.0, "recall@2": 1.0, "mrr@1": 0.5}


@pytest.mark.parametrize(
    ("run", "run_name", "qrels", "qrels_name"),
    [
        (RUN, "x.run", QRELS, "x.qrels"),
        (RUN, "x.trec", "query-id\tcorpus-id\tscore\nq1\ta\t1\nq2\tc\t2\n", "test.tsv"),
        (
            [{"id": "q1", "documents": ["b", "a"]}, {"id": "q2", "documents": [{"id": "c", "score": 0.5}]}], "p.jsonl",
            [{"id": "q1", "relevant": ["a"]}, {"id": "q2", "relevant": {"c": 2}}], "r.jsonl",
        ),
    ],
)  # fmt: skip
def test_formats(tmp_path: Path, run: object, run_name: str, qrels: object, qrels_name: str) -> None:
    found = score(TASK, write(tmp_path / run_name, run), write(tmp_path / qrels_name, qrels)).results()
    assert {name: found[name] for name in EXPECTED} == EXPECTED
    assert found["ndcg@1"] == 0.5


def test_kinds_of_queries_are_reported_apart(tmp_path: Path) -> None:
    """Mixed modalities: a picture asks for a text, a text for a picture."""
    gold = [
        {"id": "q1", "relevant": ["a"], "kind": "picture", "image": "i.png"},
        {"id": "q2", "gold": ["c"], "kind": "text"},
    ]
    found = score(TASK, write(tmp_path / "x.run", RUN), write(tmp_path / "r.jsonl", gold)).results()
    assert (found["recall@1[picture]"], found["recall@1[text]"], found["recall@1"]) == (0.0, 1.0, 0.5)
    assert TASK.ask("q1", TASK.read_references([tmp_path / "r.jsonl"])["q1"]).image == "i.png"


def test_what_is_said(tmp_path: Path) -> None:
    qrels = write(tmp_path / "q", QRELS + "q3 0 d 1\nq4 0 a 0\n")
    found = score(Retrieval(k=(1, 100)), write(tmp_path / "r", RUN + "q4 Q0 a 1 1 t\nz Q0 a 1 1 t\n"), qrels)
    assert found.results()["recall@100"] == 0.5  # q1 and q2 of four
    assert found.notes == (
        "missing: 1 of 4 references have no prediction and count as wrong: q3",
        "extra: 1 predictions have no reference and are ignored: z",
        "nothing relevant: 1 queries have no document of grade 1 or more and count as 0",
        "k=100: the longest list has 2 documents, so these count no more",
    )


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("q1 Q0 a 1 2.0\n", r"r:1: 5 columns; a TREC run has query, Q0, document, rank, score, tag"),
        (RUN + "q1 Q0 d 3 high tag\n", r"r:4: score is 'high'; it must be a finite number"),
        ("q1 Q0 d 3 nan tag\n", r"r:1: score is 'nan'"),
        ("q1 Q0 d 3 inf tag\n", r"r:1: score is 'inf'"),
        (RUN + "q1 Q0 a 3 0.1 tag\n", r"r:4: document 'a' of query 'q1' occurs twice"),
    ],
)
def test_mistakes_in_runs(tmp_path: Path, run: str, message: str) -> None:
    with pytest.raises(FileError, match=message):
        score(TASK, write(tmp_path / "r", run), write(tmp_path / "q", QRELS))


@pytest.mark.parametrize(
    ("qrels", "message"),
    [
        ("q1 0 a\n", "q:1: 3 columns; TREC qrels have query, 0, document, grade"),
        (QRELS + "q1 0 a 2\n", "q:4: document 'a' of query 'q1' is judged twice"),
        ("q1 0 a 0.5\n", "q:1: grade is '0.5'; it must be a whole number"),
    ],
)
def test_mistakes_in_qrels(tmp_path: Path, qrels: str, message: str) -> None:
    with pytest.raises(FileError, match=message):
        score(TASK, write(tmp_path / "r", RUN), write(tmp_path / "q", qrels))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"id": "q1", "documents": ["a", "a"]}, "document 'a' occurs twice"),
        ({"id": "q1", "documents": [{"id": "a", "score": 1}, "b"]}, "some documents have a score and others none"),
        ({"id": "q1"}, "is missing"),
    ],
)
def test_mistakes_in_jsonl(tmp_path: Path, line: dict, message: str) -> None:
    with pytest.raises(FileError, match=message):
        score(TASK, write(tmp_path / "p.jsonl", [line]), write(tmp_path / "q", QRELS))


def test_references_from_a_data_set() -> None:
    samples = [
        Sample("q1", "what flag?", ("x",), "picture", "", "d", ("d", "e"), b"png"),
        Sample("q2", "who?", (), "name", "", "", (), None, 0.0),
    ]
    pairs = [Pair("p1", "a flag", None, ("d",))]
    assert TASK.references_of([*samples, *pairs]) == {
        "q1": Judgements({"d": 1, "e": 1}, "picture", "what flag?", "q1"),
        "p1": Judgements({"d": 1}, "text", "a flag", None),
    }


def test_a_query_judged_in_two_files(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="'q1' is judged in an earlier file too"):
        TASK.read_references([write(tmp_path / "a", QRELS), write(tmp_path / "b", QRELS)])
