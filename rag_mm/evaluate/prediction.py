"""What comes out for one question."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Prediction:
    """What came out for one question.

    Attributes:
        id: of the question.
        answer: text, or None from a baseline that only retrieves.
        document_ids: best first; empty where nothing was retrieved.
        scores: of these documents, query.document.
        num_read: how many of them the reader read.
        truncated: a word for each text that was cut off: questions, documents, candidates, questions for the
            retriever.
    """

    id: str
    answer: str | None
    document_ids: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    num_read: int = 0
    truncated: tuple[str, ...] = ()


def answers_of(predictions: Iterable[Prediction]) -> dict[str, str]:
    """Answers by question, of those that have one."""
    return {p.id: p.answer for p in predictions if p.answer is not None}
