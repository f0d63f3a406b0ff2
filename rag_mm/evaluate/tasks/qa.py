"""Open-domain question answering: answers, and whether they stand in what was retrieved.

``answer_recall@k`` (DPR's tokens) and ``answer_recall_substring@k`` (KILT's) need the texts of the retrieved documents;
``hit@k`` needs ids of gold documents. A file has whatever it has; what is reported follows from it. A list shorter than
k counts with what it holds: there is no k too large, but it is said.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from data.document import Document
from data.samples import Pair, Sample
from rag_mm.evaluate.prediction import Prediction
from rag_mm.evaluate.prediction_files import FileError, Record, by_id, is_jsonl, read_json, read_jsonl, shown
from rag_mm.evaluate.scoring.answer_recall import first_hit, has_answer_dpr, has_answer_substring, is_searchable
from rag_mm.evaluate.scoring.squad import exact_match, f1, maximum_over
from rag_mm.evaluate.tasks.documents import DOCUMENTS, Retrieved, retrieved_documents, text_of
from rag_mm.evaluate.tasks.task import Aligned, ExampleTask, Question, named

IDS = ("id", "_id", "question_id", "qid")


@dataclass(frozen=True)
class QaReference:
    """What counts as right.

    Attributes:
        answers: accepted answers, at least one.
        documents: ids of the documents that count as right; empty where the source names none.
        kind: what to report by, such as "picture", or empty.
        unit: what the question is resampled with, such as the country it is about, or empty: itself.
    """

    question: str
    answers: tuple[str, ...]
    documents: tuple[str, ...] = ()
    kind: str = ""
    image: str | None = None
    unit: str = ""


@dataclass(frozen=True)
class QaPrediction:
    """What a system said: an answer (None: it only retrieves) and documents, best first."""

    answer: str | None
    documents: tuple[Retrieved, ...] = ()


@dataclass(frozen=True)
class OpenDomainQa(ExampleTask[QaPrediction, QaReference]):
    """Answers to questions.

    Attributes:
        k: depths of recall and hit.
        row: of files that hold several systems' lines, such as this framework's, those with this ``row``.
    """

    k: tuple[int, ...] = (1, 5, 20, 100)
    row: str = ""

    name: ClassVar[str] = "qa"
    about: ClassVar[str] = "open-domain question answering: em, f1, answer recall, hits of gold documents"
    references_are: ClassVar[str] = "jsonl {id, answers}, KILT jsonl, DPR/FiD json [{question, answers}], SQuAD json"
    predictions_are: ClassVar[str] = (
        "jsonl {id, answer, documents}, KILT jsonl, DPR/FiD json with ctxs, json {id: answer}"
    )
    definitions: ClassVar[dict[str, str]] = {
        "em": "exact match after SQuAD's normalisation, best of the accepted answers",
        "f1": "F1 of normalised words (SQuAD 2.0: 1 where both have none), best of the accepted answers",
        "answer_recall@k": "an answer's tokens stand side by side in one of the first {k} texts (DPR, uncased, NFD)",
        "answer_recall_substring@k": "a normalised answer is a substring of one of the first {k} texts (KILT)",
        "hit@k": "a gold document is among the first {k}",
    }

    def __post_init__(self) -> None:
        check_ks(self.k)

    def read_references(self, paths: Sequence[Path]) -> dict[str, QaReference]:
        return by_id((item for path in paths for item in self._references(path)), what="references")

    def read_predictions(self, path: Path) -> dict[str, QaPrediction]:
        return by_id(self._predictions(path), what="predictions")

    def ask(self, key: str, reference: QaReference) -> Question:
        return Question(key, reference.question, reference.image)

    def kind(self, reference: QaReference) -> str:
        return reference.kind

    def unit(self, key: str, reference: QaReference) -> str:
        return reference.unit or key

    def references_of(self, items: Iterable[Sample | Pair]) -> dict[str, QaReference]:
        """From questions; those about one subject are resampled together."""
        return {
            s.id: QaReference(s.question, s.answers, s.gold, s.kind, s.id if s.kind == "picture" else None, s.subject)
            for s in items
            if isinstance(s, Sample) and s.weight
        }

    def predictions_of(
        self, predictions: Iterable[Prediction], documents: Mapping[str, Document]
    ) -> dict[str, QaPrediction]:
        return {
            p.id: QaPrediction(
                p.answer,
                tuple(
                    Retrieved(name, text_of(documents[name]), score)
                    for name, score in zip(p.document_ids, p.scores, strict=True)
                ),
            )
            for p in predictions
            if p.answer is not None or p.document_ids
        }

    def score_example(self, prediction: QaPrediction | None, reference: QaReference) -> dict[str, float]:
        answer = prediction.answer if prediction else None
        documents = prediction.documents if prediction else ()
        values = {
            "em": 0.0 if answer is None else maximum_over(exact_match, answer, reference.answers),
            "f1": 0.0 if answer is None else maximum_over(f1, answer, reference.answers),
        }
        texts = [document.text or "" for document in documents]
        found = {
            "answer_recall": first_hit(has_answer_dpr(text, reference.answers) for text in texts),
            "answer_recall_substring": first_hit(has_answer_substring(text, reference.answers) for text in texts),
        }
        if reference.documents:
            found["hit"] = first_hit(document.id in reference.documents for document in documents)
        for stem, rank in found.items():
            values |= {f"{stem}@{k}": float(rank is not None and rank <= k) for k in self.k}
        return values

    def reported(self, aligned: Aligned[QaPrediction, QaReference]) -> dict[str, bool]:
        there = [p for p in aligned.predictions.values() if p is not None]
        answers = any(p.answer is not None for p in there)
        texts = any(d.text is not None for p in there for d in p.documents)
        found = {"em": answers, "f1": answers, "answer_recall": texts, "answer_recall_substring": texts}
        return found | {"hit": any(p.documents for p in there)}

    def notes(self, aligned: Aligned[QaPrediction, QaReference]) -> list[str]:
        there = {key: p for key, p in aligned.predictions.items() if p is not None}
        silent = [key for key, p in there.items() if p.answer is None]
        found = []
        if silent and len(silent) < len(there):
            found.append(f"no answer: {len(silent)} predictions have none and count as wrong: {named(silent)}")
        deepest = max((len(p.documents) for p in there.values()), default=0)
        too_deep = [k for k in self.k if k > deepest]
        if deepest and too_deep:
            found.append(
                f"k={','.join(map(str, too_deep))}: the longest list has {deepest} documents, so these count no more"
            )
        texts = [d.text is not None for p in there.values() for d in p.documents]
        if any(texts) and not all(texts):
            found.append(
                f"no text: {texts.count(False)} of {len(texts)} retrieved documents have none; no answer is found there"
            )
        blank = [key for key, r in aligned.references.items() if not all(map(is_searchable, r.answers))]
        if any(texts) and blank:
            found.append(
                f"unsearchable: {len(blank)} references have an answer of which nothing is left: {named(blank)}"
            )
        without = [key for key, r in aligned.references.items() if not r.documents]
        if deepest and without and len(without) < len(aligned.references):
            found.append(f"no gold document: {len(without)} references name none and are in no hit@k: {named(without)}")
        return found

    def context(self, aligned: Aligned[QaPrediction, QaReference]) -> dict[str, Any]:
        lengths = [len(p.documents) for p in aligned.predictions.values() if p is not None]
        return {"k": list(self.k), "documents_per_prediction": [min(lengths), max(lengths)]}

    def _references(self, path: Path) -> Iterator[tuple[str, Record, QaReference]]:
        for record in self._records(path):
            yield _kilt_reference(record) if record.has("output") else _plain_reference(record)

    def _predictions(self, path: Path) -> Iterator[tuple[str, Record, QaPrediction]]:
        for record in self._records(path, mapping=True):
            if isinstance(record.values.get("output"), list):
                output = only_output(record)
                documents = retrieved_documents(output, "provenance") if output.has("provenance") else ()
                answer = output.text("answer") if output.has("answer") else None
                yield record.id(*IDS), record, QaPrediction(answer, documents)
                continue
            if not any(name in record.values for name in (*_ANSWER, *DOCUMENTS)):
                record.get(*_ANSWER, *DOCUMENTS)  # fails, naming what is there
            documents = retrieved_documents(record) if record.has(*DOCUMENTS) else ()
            answer = record.text(*_ANSWER) if record.has(*_ANSWER) else None
            yield _key(record), record, QaPrediction(answer, documents)

    def _records(self, path: Path, *, mapping: bool = False) -> Iterator[Record]:
        for record in _all_records(path, mapping=mapping):
            if not self.row or record.values.get("row") == self.row:
                yield record


_ANSWER = ("answer", "prediction", "prediction_text", "output")


def only_output(record: Record) -> Record:
    """The one output that a prediction in KILT's format has."""
    outputs = record.objects("output")
    if len(outputs) != 1:
        record.fail(f"field output has {len(outputs)} entries; a prediction must have exactly one")
    return outputs[0]


def _kilt_reference(record: Record) -> tuple[str, Record, QaReference]:
    outputs = record.objects("output")
    answers = tuple(o.text("answer") for o in outputs if o.has("answer") and o.text("answer").strip())
    pages = [p.id("wikipedia_id") for o in outputs if o.has("provenance") for p in o.objects("provenance")]
    if not answers:
        record.fail("field output has no answer; it must hold at least one")
    return record.id(*IDS), record, QaReference(_question(record), answers, tuple(dict.fromkeys(pages)))


def _plain_reference(record: Record) -> tuple[str, Record, QaReference]:
    answers = record.values.get("answers")
    if isinstance(answers, dict):  # SQuAD as `datasets` has it: {"text": [...], "answer_start": [...]}
        accepted = Record(record.path, record.line, answers, "answers").texts("text")
    elif isinstance(answers, list) and answers and all(isinstance(a, dict) for a in answers):  # SQuAD's own
        accepted = tuple(a.text("text", "answer") for a in record.objects("answers"))
    else:
        accepted = record.texts("gold_answers", "answers", "answer")
    gold = record.values.get("gold_documents", record.values.get("gold", []))
    if not isinstance(gold, list):
        record.fail(f"field gold_documents is {shown(gold)}; it must be a list of document ids")
    documents = tuple(record.identifier("gold_documents", document) for document in gold)
    kind = record.text("kind") if record.has("kind") else ""
    image = record.id("image", "image_id") if record.has("image", "image_id") else None
    unit = record.id("unit", "subject", "country") if record.has("unit", "subject", "country") else ""
    return _key(record), record, QaReference(_question(record), accepted, documents, kind, image, unit)


def _all_records(path: Path, *, mapping: bool) -> Iterator[Record]:
    """Records of jsonl, of an array, of SQuAD's nesting, or of one object from id to answer."""
    if is_jsonl(path):
        yield from read_jsonl(path)
        return
    file = read_json(path)
    if "" in file.records:
        yield from file.records[""]
    elif "data" in file.records:
        for article in file.records["data"]:
            if not article.has("paragraphs"):
                yield article
                continue
            for paragraph in article.objects("paragraphs"):
                yield from paragraph.objects("qas")
    elif mapping and not file.records:
        for key, value in file.values.items():
            yield Record(path, 1, {"id": key, "answer": value}, json.dumps(key))
    else:
        raise FileError(
            f"{path}: holds {', '.join(map(repr, [*file.records, *file.values]))}; a list of objects is expected"
        )


def _key(record: Record) -> str:
    """The id; files of DPR have none and are told apart by their questions."""
    return record.id(*IDS) if record.has(*IDS) else record.text("question", *IDS).strip()


def _question(record: Record) -> str:
    return record.text("question", "input") if record.has("question", "input") else ""


def check_ks(ks: Sequence[int]) -> None:
    """ValueError unless all depths are at least 1."""
    if not ks or min(ks) < 1:
        raise ValueError(f"k is {','.join(map(str, ks)) or 'empty'}; it must be whole numbers from 1, such as 1,5,20")
