"""One order from two: what the embeddings find and what the words find (BM25).

Words find rare names and numbers that an embedding blurs, embeddings find what is said in other words; a document that
both find is likely right. Their scores have nothing in common, so either only the ranks count (reciprocal rank
fusion, Cormack, Clarke and Buettcher 2009: a weighted sum of 1 / (60 + rank)), or the scores, each
query's stretched to 0 (its last) to 1 (its first), are summed with weights. What one side did not find counts 0 there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

CONSTANT = 60  # of the paper; how little the first ranks differ

How = Literal["reciprocal_rank", "weighted_sum"]
Found = tuple[Sequence[Sequence[str]], Sequence[Sequence[float]]]  # ids of each query, best first, and their scores


def fuse(dense: Found, lexical: Found, *, how: How, weight: float, k: int) -> tuple[list[list[str]], list[list[float]]]:
    """Ids and scores of the k best of each query, ties by id.

    Args:
        weight: of what the words find; the embeddings have 1 - weight.
    """
    points = _by_rank if how == "reciprocal_rank" else _by_score
    ids, scores = [], []
    for b in range(len(dense[0])):
        ours, theirs = points(dense[0][b], dense[1][b]), points(lexical[0][b], lexical[1][b])
        total = {
            name: (1 - weight) * ours.get(name, 0.0) + weight * theirs.get(name, 0.0)
            for name in ours.keys() | theirs.keys()
        }
        best = sorted(total, key=lambda name: (-total[name], name))[:k]
        ids.append(best)
        scores.append([total[name] for name in best])
    return ids, scores


def _by_rank(ids: Sequence[str], scores: Sequence[float]) -> Mapping[str, float]:
    return {name: 1 / (CONSTANT + rank) for rank, name in enumerate(ids, start=1)}


def _by_score(ids: Sequence[str], scores: Sequence[float]) -> Mapping[str, float]:
    if not scores:
        return {}
    low, high = min(scores), max(scores)
    return {name: (score - low) / (high - low) if high > low else 1.0 for name, score in zip(ids, scores, strict=True)}
