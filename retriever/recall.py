"""How many of the exact ten best a search finds, and how hard it must search to find enough.

The effort is chosen on one half of the queries, and what it reaches is measured on the other half, which goes into the
manifest: a figure that was not fitted to the queries it is of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from retriever.faiss_import import faiss
from retriever.manifest import Manifest
from retriever.search import Rows, Scores, Vectors

DEPTH = 10
SPARE = 0.02  # recall beyond the target on the queries that it is tuned on


@dataclass(frozen=True)
class Exact:
    """The exact best rows (Q, up to 10) of queries (Q, E) among some vectors, and their scores."""

    query: Scores
    rows: Rows
    scores: Scores

    @classmethod
    def of(cls, query: Scores, vectors: Scores, *, first: int) -> Exact:
        """Among the vectors of rows from ``first`` on."""
        k = min(DEPTH, len(vectors))
        scores, rows = faiss.knn(query, vectors, k, metric=faiss.METRIC_INNER_PRODUCT)
        return cls(query, rows + first, scores)


def merge_exact(query: Scores, parts: Sequence[Exact]) -> Exact:
    """The best of all parts."""
    if not parts:
        return Exact(query, numpy.zeros((len(query), 0), numpy.int64), numpy.zeros((len(query), 0), numpy.float32))
    scores = numpy.concatenate([part.scores for part in parts], axis=1)
    rows = numpy.concatenate([part.rows for part in parts], axis=1)
    order = numpy.lexsort((rows, -scores), axis=1)[:, :DEPTH]
    return Exact(query, numpy.take_along_axis(rows, order, 1), numpy.take_along_axis(scores, order, 1))


def recall(found: NDArray[numpy.int64], right: Rows) -> float:
    """Mean share of the right rows that were found."""
    return float(numpy.mean([len(numpy.intersect1d(a, b)) / len(b) for a, b in zip(found, right, strict=True)]))


def search_hard_enough(index: Any, exact: Exact, *, target: float) -> tuple[int, float]:
    """The least effort that reaches a recall, in steps of a quarter, and the recall it has on other queries.

    Where none reaches it (codes are not exact), the one after which recall no longer rises.
    """
    vectors, half = Vectors(index), len(exact.query) // 2

    def reached(effort: int, queries: slice) -> float:
        return recall(vectors.search(exact.query[queries], DEPTH, effort)[1], exact.rows[queries])

    effort = min(DEPTH if hasattr(index, "hnsw") else 1, vectors.most_effort)
    tune, rest, enough = slice(half), slice(half, None), min(1.0, target + SPARE)
    best = 0.0
    gained_at = effort
    while True:
        now = reached(effort, tune)
        if now > best + 1e-3:
            best, gained_at = now, effort
        if now >= enough:
            break
        if effort >= vectors.most_effort or (effort >= 8 * gained_at):
            effort = gained_at
            break
        effort = min(vectors.most_effort, math.ceil(1.25 * effort))
    return effort, reached(effort, rest)


def complaint(manifest: Manifest, target: float) -> str:
    """A sentence if an index does not find what was asked for, else nothing."""
    if not 0 <= manifest.recall_at_10 < target:
        return ""
    return (
        f"recall@{DEPTH} of {manifest.factory} is {manifest.recall_at_10:.3f}, below index.recall ({target}); raise "
        "that a little, or where the vectors are compressed (PQ) take whole ones (IVF...,Flat or ...,SQfp16)"
    )
