"""KILT's scores: answers that count only where the evidence was found (2009.02252, and its public scorer).

A gold record has several outputs, each with an answer, an evidence set of pages (``wikipedia_id``), or both.
R-precision is the best over evidence sets of the share of a set's R pages among the first R retrieved; recall@k treats
a set as one item that is found where its last page is. A KILT-score is the answer's score where R-precision is 1, else
0. An empty prediction scores 0 in everything about the answer; pages named twice count once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rag_mm.evaluate.scoring.rouge import rouge_l
from rag_mm.evaluate.scoring.squad import f1, normalise_answer

EvidenceSets = Sequence[Collection[str]]


def unique(ids: Iterable[str]) -> list[str]:
    """Each id once, at its first place."""
    return list(dict.fromkeys(ids))


def r_precision(retrieved: Sequence[str], evidence_sets: EvidenceSets) -> float:
    """Best share, over evidence sets, of a set's R pages among the first R retrieved; 0 without any evidence set."""
    pages = unique(retrieved)
    shares = [len(set(pages[: len(e)]) & set(e)) / len(e) for e in map(set, evidence_sets) if e]
    return max(shares, default=0.0)


def hits_in_rank(retrieved: Sequence[str], evidence_sets: EvidenceSets) -> list[bool]:
    """The ranking in which a whole evidence set is one item: True where a set is complete.

    Pages of a set that are found before its last one leave no trace (the set moves down to its last page, and what
    came between moves up); an incomplete set keeps one place, as not found.
    """
    remaining = [set(e) for i, e in enumerate(evidence_sets) if set(e) not in [set(o) for o in evidence_sets[:i]]]
    rank: list[bool | int] = []  # True: a complete set, an int: the set of that number so far, False: no evidence
    for page in unique(retrieved):
        found = False
        for number, pages in enumerate(remaining):
            if page not in pages:
                continue
            found = True
            rank = [item for item in rank if isinstance(item, bool) or item != number]
            pages.remove(page)
            rank.append(number if pages else True)
        if not found:
            rank.append(False)
    return [item is True for item in rank]


def recall_at(k: int, retrieved: Sequence[str], evidence_sets: EvidenceSets) -> float:
    """Complete evidence sets among the first k of that ranking, divided by the number of different sets."""
    different = {frozenset(e) for e in evidence_sets}
    if not different or not retrieved:
        return 0.0
    return sum(hits_in_rank(retrieved, evidence_sets)[:k]) / len(different)


def answer_scores(answer: str, golds: Iterable[str]) -> dict[str, float]:
    """``accuracy`` (the strings are equal), ``em`` and ``f1`` (normalised), ``rouge_l`` (not), best over gold answers.

    Raises:
        ValueError: if no gold answer is left once empty ones are dropped.
    """
    kept = {gold.strip() for gold in golds if gold.strip()}
    if not kept:
        raise ValueError("there is no gold answer")
    answer = answer.strip()
    if not answer:
        return {"accuracy": 0.0, "em": 0.0, "f1": 0.0, "rouge_l": 0.0}
    mine = normalise_answer(answer)
    return {
        "accuracy": float(answer in kept),
        "em": float(any(mine == normalise_answer(gold) for gold in kept)),
        "f1": max(f1(answer, gold) for gold in kept) if mine else 0.0,
        "rouge_l": max(rouge_l(answer, gold) for gold in kept),
    }
