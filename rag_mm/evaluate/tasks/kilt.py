"""KILT: answers, evidence, and answers that count only with their evidence (KILT-scores).

``accuracy``, ``em``, ``f1`` and ``rouge_l`` are of the answer alone; ``kilt_accuracy``, ``kilt_em``, ``kilt_f1`` and
``kilt_rouge_l`` are the same where R-precision is 1, else 0. Which of them a paper reports depends on the data set: EM
for short answers, accuracy for classes, ROUGE-L for long answers (ELI5), ROUGE-L or F1 for dialogue. All are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from data.document import Document
from data.samples import Pair, Sample
from rag_mm.evaluate.prediction import Prediction
from rag_mm.evaluate.prediction_files import Record, by_id, read_jsonl
from rag_mm.evaluate.scoring import kilt
from rag_mm.evaluate.scoring.answer_recall import first_hit, has_answer_substring
from rag_mm.evaluate.tasks.documents import text_of
from rag_mm.evaluate.tasks.qa import check_ks, only_output
from rag_mm.evaluate.tasks.task import Aligned, ExampleTask, Question


@dataclass(frozen=True)
class KiltReference:
    """A gold record: answers, and evidence sets of page ids (empty ones as in the file)."""

    question: str
    answers: tuple[str, ...]
    evidence_sets: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class KiltPrediction:
    """An answer, pages best first, and their texts where the file gives them."""

    answer: str
    pages: tuple[str, ...]
    texts: tuple[str | None, ...]


@dataclass(frozen=True)
class Kilt(ExampleTask[KiltPrediction, KiltReference]):
    """Any KILT data set.

    Attributes:
        k: depths of recall.
    """

    k: tuple[int, ...] = (1, 5)

    name: ClassVar[str] = "kilt"
    about: ClassVar[str] = "KILT: answers, R-precision, recall of evidence sets, KILT-scores"
    references_are: ClassVar[str] = "KILT jsonl {id, input, output: [{answer, provenance: [{wikipedia_id}]}]}"
    predictions_are: ClassVar[str] = "KILT jsonl, one output each"
    definitions: ClassVar[dict[str, str]] = {
        "accuracy": "the answer is one of the gold answers, spaces at its ends aside",
        "em": "exact match after SQuAD's normalisation, best of the gold answers; an empty answer is wrong",
        "f1": "F1 of normalised words, best of the gold answers; 0 where no word is shared",
        "rouge_l": "ROUGE-L of the package rouge 1.0, as KILT calls it: not normalised, sentences end at full stops, "
        "different words are counted; best of the gold answers",
        "r_precision": "share of an evidence set's R pages among the first R retrieved, best evidence set",
        "recall@k": "share of evidence sets that are complete among the first {k}, a set counting as one place",
        "kilt_accuracy": "accuracy where R-precision is 1, else 0",
        "kilt_em": "em where R-precision is 1, else 0",
        "kilt_f1": "f1 where R-precision is 1, else 0",
        "kilt_rouge_l": "rouge_l where R-precision is 1, else 0",
        "answer_recall_substring@k": "a normalised gold answer is a substring of one of the first {k} texts",
    }

    def __post_init__(self) -> None:
        check_ks(self.k)

    def read_references(self, paths: Sequence[Path]) -> dict[str, KiltReference]:
        return by_id((item for path in paths for item in _references(path)), what="references")

    def read_predictions(self, path: Path) -> dict[str, KiltPrediction]:
        return by_id(_predictions(path), what="predictions")

    def references_of(self, items: Iterable[Sample | Pair]) -> dict[str, KiltReference]:
        """From questions as `data.formats.kilt` keeps them: their outputs are in ``meta``."""
        found = {}
        for s in items:
            if isinstance(s, Sample) and s.weight:
                record = Record(Path("questions"), 0, {**s.meta, "id": s.id, "input": s.question}, s.id)
                found[s.id] = _reference(record)
        return found

    def predictions_of(
        self, predictions: Iterable[Prediction], documents: Mapping[str, Document]
    ) -> dict[str, KiltPrediction]:
        """Documents are pages, or passages that say of which page they are."""
        found = {}
        for p in predictions:
            if p.answer is not None:
                read = [documents[name] for name in p.document_ids]
                pages = tuple(str(document.meta.get("document", document.id)) for document in read)
                found[p.id] = KiltPrediction(p.answer, pages, tuple(map(text_of, read)))
        return found

    def ask(self, key: str, reference: KiltReference) -> Question:
        return Question(key, reference.question)

    def score_example(self, prediction: KiltPrediction | None, reference: KiltReference) -> dict[str, float]:
        prediction = prediction or KiltPrediction("", (), ())
        pages, texts = prediction.pages, prediction.texts
        values: dict[str, float] = {}
        precision = kilt.r_precision(pages, reference.evidence_sets)
        if reference.answers:
            answers = kilt.answer_scores(prediction.answer, reference.answers)
            values |= answers | {f"kilt_{name}": value * (precision == 1) for name, value in answers.items()}
        values["r_precision"] = precision
        values |= {f"recall@{k}": kilt.recall_at(k, pages, reference.evidence_sets) for k in self.k}
        if reference.answers:
            rank = first_hit(has_answer_substring(text or "", reference.answers) for text in texts)
            values |= {f"answer_recall_substring@{k}": float(rank is not None and rank <= k) for k in self.k}
        return values

    def reported(self, aligned: Aligned[KiltPrediction, KiltReference]) -> dict[str, bool]:
        there = [p for p in aligned.predictions.values() if p is not None]
        return {"answer_recall_substring": any(text is not None for p in there for text in p.texts)}

    def notes(self, aligned: Aligned[KiltPrediction, KiltReference]) -> list[str]:
        silent = sum(not r.answers for r in aligned.references.values())
        without = sum(not any(r.evidence_sets) for r in aligned.references.values())
        found = [f"no gold answer: {silent} references have none and are in no score of answers"] if silent else []
        if without:
            found.append(f"no evidence: {without} references name no page and count as not found")
        return found

    def context(self, aligned: Aligned[KiltPrediction, KiltReference]) -> dict[str, Any]:
        return {"k": list(self.k), "pages_are": "wikipedia_id"}


def _references(path: Path) -> Iterator[tuple[str, Record, KiltReference]]:
    for record in read_jsonl(path):
        yield record.id("id"), record, _reference(record)


def _reference(record: Record) -> KiltReference:
    outputs = record.objects("output")
    if not outputs:
        record.fail("field output is empty; a gold record needs an answer or evidence")
    answers = tuple(o.text("answer") for o in outputs if o.has("answer") and o.text("answer").strip())
    evidence = [_pages(output) for output in outputs if output.has("provenance")]
    question = record.text("input") if record.has("input") else ""
    return KiltReference(question, answers, tuple(dict.fromkeys(evidence)))


def _predictions(path: Path) -> Iterator[tuple[str, Record, KiltPrediction]]:
    for record in read_jsonl(path):
        output = only_output(record)
        provenance = output.objects("provenance") if output.has("provenance") else []
        texts = tuple(entry.text("text") if entry.has("text") else None for entry in provenance)
        answer = output.text("answer") if output.has("answer") else ""
        yield record.id("id"), record, KiltPrediction(answer, _pages(output, unique=False), texts)


def _pages(output: Record, *, unique: bool = True) -> tuple[str, ...]:
    """Page ids in order; entries without one (such as web pages) are passed over, as in KILT's scorer."""
    entries = output.objects("provenance") if output.has("provenance") else []
    pages = [entry.id("wikipedia_id") for entry in entries if entry.has("wikipedia_id")]
    return tuple(dict.fromkeys(pages)) if unique else tuple(pages)
