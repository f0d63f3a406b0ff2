"""Document retrieval, whatever the modality of queries and documents: recall, hit, MRR, nDCG by trec_eval's rules.

Judgements in jsonl may give the ``kind`` of a query (such as picture, text, both); figures are then reported by kind
too, because a mean over modalities says little about any of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from data.document import Document
from data.samples import Pair, Sample
from rag_mm.evaluate.prediction import Prediction
from rag_mm.evaluate.prediction_files import FileError, Record, by_id, is_jsonl, read_jsonl, read_lines, shown
from rag_mm.evaluate.scoring.ranking import ranking_scores
from rag_mm.evaluate.tasks.documents import DOCUMENTS, retrieved_documents
from rag_mm.evaluate.tasks.qa import IDS, check_ks
from rag_mm.evaluate.tasks.task import Aligned, ExampleTask, Question

Ranking = Mapping[str, float]


@dataclass(frozen=True)
class Judgements:
    """Grades of one query by document; those not named have grade 0."""

    grades: Mapping[str, int]
    kind: str = ""
    query: str = ""
    image: str | None = None


@dataclass(frozen=True)
class Retrieval(ExampleTask[Ranking, Judgements]):
    """Ranked documents.

    Attributes:
        k: depths.
    """

    k: tuple[int, ...] = (1, 5, 10, 100)

    name: ClassVar[str] = "retrieval"
    about: ClassVar[str] = "document retrieval of any modality: hit, recall, MRR, nDCG"
    references_are: ClassVar[str] = "TREC qrels, BEIR qrels tsv, jsonl {id, relevant: [ids] or {id: grade}, kind}"
    predictions_are: ClassVar[str] = "TREC run; jsonl {id, documents: [ids] or [{id, score}]}"
    definitions: ClassVar[dict[str, str]] = {
        "hit@k": "a relevant document is among the first {k}",
        "recall@k": "share of all relevant documents among the first {k}",
        "ndcg@k": "nDCG of the first {k}, gain the grade, discount log2(rank + 1)",
        "mrr@k": "1 / rank of the first relevant document, 0 below rank {k}",
        "mrr": "1 / rank of the first relevant document of the whole list",
        "map": "mean average precision of the whole list",
    }

    def __post_init__(self) -> None:
        check_ks(self.k)

    def read_references(self, paths: Sequence[Path]) -> dict[str, Judgements]:
        found: dict[str, Judgements] = {}
        for path in paths:
            new = by_id(map(_judged, read_jsonl(path)), what="references") if is_jsonl(path) else _qrels(path)
            if both := found.keys() & new.keys():
                raise FileError(f"{path}: query {min(both)!r} is judged in an earlier file too")
            found |= new
        return found

    def read_predictions(self, path: Path) -> dict[str, Ranking]:
        if is_jsonl(path):
            return by_id(map(_listed, read_jsonl(path)), what="predictions")
        return _run(path)

    def ask(self, key: str, reference: Judgements) -> Question:
        return Question(key, reference.query, reference.image)

    def kind(self, reference: Judgements) -> str:
        return reference.kind

    def references_of(self, items: Iterable[Sample | Pair]) -> dict[str, Judgements]:
        """From questions and pairs; what asks is the kind: "picture" or "text"."""
        found = {}
        for item in items:
            if item.weight:
                words = item.question if isinstance(item, Sample) else item.text
                pictured = item.kind == "picture" if isinstance(item, Sample) else item.image is not None
                kind, image = ("picture", item.id) if pictured else ("text", None)
                found[item.id] = Judgements(dict.fromkeys(item.gold, 1), kind, words, image)
        return found

    def predictions_of(
        self, predictions: Iterable[Prediction], documents: Mapping[str, Document]
    ) -> dict[str, Ranking]:
        """In the order that they were found in, whatever trec_eval would make of equal scores."""
        return {
            p.id: {name: float(len(p.document_ids) - i) for i, name in enumerate(p.document_ids)}
            for p in predictions
            if p.document_ids
        }

    def score_example(self, prediction: Ranking | None, reference: Judgements) -> dict[str, float]:
        return ranking_scores({"q": prediction or {}}, {"q": reference.grades}, ks=self.k)["q"]

    def notes(self, aligned: Aligned[Ranking, Judgements]) -> list[str]:
        found = []
        if nothing := sum(not any(g > 0 for g in r.grades.values()) for r in aligned.references.values()):
            found.append(f"nothing relevant: {nothing} queries have no document of grade 1 or more and count as 0")
        deepest = max((len(p) for p in aligned.predictions.values() if p is not None), default=0)
        if too_deep := [k for k in self.k if k > deepest]:
            found.append(
                f"k={','.join(map(str, too_deep))}: the longest list has {deepest} documents, so these count no more"
            )
        return found

    def context(self, aligned: Aligned[Ranking, Judgements]) -> dict[str, Any]:
        lengths = [len(p) for p in aligned.predictions.values() if p is not None]
        return {
            "k": list(self.k),
            "documents_per_query": [min(lengths), max(lengths)],
            "ties": "trec_eval: score in single precision, then document id, both descending",
        }


def _judged(record: Record) -> tuple[str, Record, Judgements]:
    name, value = record.get("relevant", "gold_documents", "gold", "qrels")
    if isinstance(value, dict):
        grades = {key: _grade(record, f"{name}.{key}", grade) for key, grade in value.items()}
    elif isinstance(value, list):
        grades = {record.identifier(name, key): 1 for key in value}
    else:
        record.fail(f"field {name} is {shown(value)}; it must be a list of document ids or a mapping from id to grade")
    kind = record.text("kind") if record.has("kind") else ""
    query = record.text("query", "question", "text") if record.has("query", "question", "text") else ""
    image = record.id("image", "image_id") if record.has("image", "image_id") else None
    return record.id(*IDS), record, Judgements(grades, kind, query, image)


def _grade(record: Record, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        record.fail(f"field {name} is {shown(value)}; a grade must be a whole number")
    return value


def _listed(record: Record) -> tuple[str, Record, Ranking]:
    """A list without scores keeps its order: scores descend from its length."""
    documents = retrieved_documents(record, *DOCUMENTS, "ranked")
    ranking: dict[str, float] = {}
    for i, document in enumerate(documents):
        if document.id in ranking:
            record.fail(f"document {document.id!r} occurs twice in the list")
        ranking[document.id] = float(len(documents) - i) if document.score is None else document.score
    if any(d.score is None for d in documents) and any(d.score is not None for d in documents):
        record.fail("some documents have a score and others none; give all or none")
    return record.id(*IDS), record, ranking


def _columns(path: Path, size: int, what: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in read_lines(path):
        parts = line.split()
        if len(parts) != size:
            raise FileError(f"{path}:{number}: {len(parts)} columns; {what}")
        yield number, parts


def _qrels(path: Path) -> dict[str, Judgements]:
    """TREC (query, iteration, document, grade) or BEIR (a header, then query, document, grade)."""
    first = next(read_lines(path))[1]
    beir = first.lower().startswith(("query-id", "query_id"))
    size = 3 if beir else 4
    what = "query, document, grade are expected" if beir else "TREC qrels have query, 0, document, grade"
    grades: dict[str, dict[str, int]] = {}
    for number, parts in _columns(path, size, what):
        if beir and parts[0].lower() in ("query-id", "query_id"):
            continue
        query, document, grade = parts[0], parts[-2], parts[-1]
        try:
            value = int(grade)
        except ValueError:
            raise FileError(f"{path}:{number}: grade is {grade!r}; it must be a whole number") from None
        if document in grades.setdefault(query, {}):
            raise FileError(f"{path}:{number}: document {document!r} of query {query!r} is judged twice")
        grades[query][document] = value
    return {query: Judgements(judged) for query, judged in grades.items()}


def _run(path: Path) -> dict[str, Ranking]:
    """TREC run: query, Q0, document, rank, score, tag; the rank is not used, as in trec_eval."""
    run: dict[str, dict[str, float]] = {}
    for number, parts in _columns(path, 6, "a TREC run has query, Q0, document, rank, score, tag"):
        query, _, document, _, score, _ = parts
        try:
            value = float(score)
        except ValueError:
            value = float("nan")
        if not abs(value) < float("inf"):
            raise FileError(f"{path}:{number}: score is {score!r}; it must be a finite number")
        if document in run.setdefault(query, {}):
            raise FileError(f"{path}:{number}: document {document!r} of query {query!r} occurs twice")
        run[query][document] = value
    return dict(run)
