"""Retrieved documents as prediction files list them: ids, or objects with id, text and score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data.document import Document
from rag_mm.evaluate.prediction_files import Record, shown

DOCUMENTS = ("documents", "ctxs", "passages", "retrieved")


@dataclass(frozen=True)
class Retrieved:
    """One retrieved document.

    Attributes:
        text: its text without title, None where the file does not give it.
        score: None where the file does not give it.
    """

    id: str
    text: str | None = None
    score: float | None = None


def text_of(document: Document) -> str:
    """A document's text without its title, in which no answer is looked for."""
    return document.text.partition("\n")[2]


def retrieved_documents(record: Record, *names: str) -> tuple[Retrieved, ...]:
    """The documents of a record, best first; scores may stand in them, or beside them in ``scores``.

    Raises:
        FileError: if a document is neither an id nor an object with one, or scores rise down the list.
    """
    name, values = record.get(*(names or DOCUMENTS))
    if not isinstance(values, list):
        record.fail(f"field {name} is {shown(values)}; it must be a list of documents, best first")
    beside = _scores_beside(record, name, len(values))
    found = []
    for i, value in enumerate(values):
        if not isinstance(value, dict):
            found.append(Retrieved(record.identifier(f"{name}[{i}]", value), None, beside[i]))
            continue
        inner = Record(record.path, record.line, value, f"{name}[{i}]")
        text = inner.text("text", "contents") if inner.has("text", "contents") else None
        score = inner.values.get("score")
        if isinstance(score, str):  # DPR writes them as text
            try:
                score = float(score)
            except ValueError:
                inner.fail(f"field score is {shown(score)}; it must be a finite number")
        score = beside[i] if score is None else inner.finite("score", score)
        key = inner.id("id", "docid", "document_id", "passage_id", "_id") if not inner.has("wikipedia_id") else ""
        found.append(Retrieved(key or inner.id("wikipedia_id"), text, score))
    _check_order(record, name, found)
    return tuple(found)


def _scores_beside(record: Record, name: str, size: int) -> Sequence[float | None]:
    scores = record.values.get("scores")
    if scores is None:
        return [None] * size
    if not isinstance(scores, list) or len(scores) != size:
        record.fail(f"field scores is {shown(scores)}; it must be a list of {size} numbers, one for each of {name}")
    return [record.finite(f"scores[{i}]", score) for i, score in enumerate(scores)]


def _check_order(record: Record, name: str, documents: Sequence[Retrieved]) -> None:
    for i in range(1, len(documents)):
        before, here = documents[i - 1].score, documents[i].score
        if before is not None and here is not None and here > before:
            record.fail(f"{name}[{i}] has score {here:g} after {before:g}; documents must be listed best first")
