"""The k best rows of a faiss index: ties by id, without forbidden rows, never fewer than there are.

faiss alone gives none of this. Equal scores come in an order that depends on the batch and on the block of vectors they
were computed in; an IVF search that visits few lists pads its answer with -1; what may not be found takes places. So
some more rows are fetched than asked for, and where that did not settle a query (a tie across the border, too few
left), it alone is searched again with twice as many, visiting more lists, until nothing is left to visit.

A flat index's scores are computed once more for the rows that were found, one pair at a time: then they do not depend
on what else is in the batch or in the index, and parts of an index merge into exactly what the whole one finds. The
cost of all this on top of faiss is in docs/benchmarks.md.

Shapes: B queries, W rows fetched for each, E width.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import numpy
from numpy.typing import NDArray

from retriever.faiss_import import faiss
from retriever.vector_files import inverted_lists

MARGIN, MARGIN_OF_LISTS = 8, 2  # rows fetched beyond k; where all vectors are compared anyway they cost nothing
GPU_LARGEST = 2048  # k and nprobe of faiss on a GPU
Scores: TypeAlias = NDArray[numpy.float32]
Rows: TypeAlias = NDArray[numpy.int64]


class Vectors:
    """A faiss index whose ids are rows, searched with more or less effort.

    Attributes:
        effort: lists that are visited at first (IVF), or candidates that are kept (HNSW).
        most_effort: with which everything is visited; 0: it always is.
        is_flat: whether search is exact, on the vectors themselves.
        on_gpu: whether the vectors are on a GPU.
    """

    def __init__(self, index: Any, *, effort: int = 0, dead: Rows | None = None, on_gpu: bool = False) -> None:
        self.index, self.on_gpu = index, on_gpu
        ivf = None if on_gpu else inverted_lists(index)
        self._num_lists: int = getattr(index, "nlist", 0) if ivf is None else ivf.nlist
        self._has_graph_of_lists = ivf is not None and hasattr(faiss.downcast_index(ivf.quantizer), "hnsw")
        self._is_hnsw = hasattr(index, "hnsw")
        self.is_flat = isinstance(index, faiss.IndexFlat)
        most = self._num_lists or (len(self) if self._is_hnsw else 0)
        self.most_effort = min(most, GPU_LARGEST) if on_gpu else most
        self.effort = min(effort, self.most_effort) or self.most_effort
        self._params: dict[int, Any] = {}
        self._selector = None
        if dead is not None and len(dead):
            alive = numpy.ones(len(self), dtype=bool)
            alive[dead] = False
            self._alive = numpy.packbits(alive, bitorder="little")
            self._selector = faiss.IDSelectorBitmap(self._alive)

    def __len__(self) -> int:
        return int(self.index.ntotal)

    def search(self, query_BE: Scores, k: int, effort: int) -> tuple[Scores, Rows]:
        """Scores and rows (B, k), best first, -1 where too few were visited."""
        index = self.index
        if self._is_hnsw and effort >= self.most_effort:
            index = index.storage  # a graph may have parts that are not connected
            params = self._how(0)
        else:
            params = self._how(max(effort, k) if self._is_hnsw else effort)
        found: tuple[Scores, Rows] = index.search(query_BE, k, params=params)
        return found

    def _how(self, effort: int) -> Any:
        """faiss's search parameters, made once for each effort (0: of a search that visits everything)."""
        if effort not in self._params:
            self._params[effort] = self._make_params(effort)
        return self._params[effort]

    def _make_params(self, effort: int) -> Any:
        selector = self._selector
        if self._is_hnsw and effort:
            return faiss.SearchParametersHNSW(efSearch=effort, sel=selector)
        if self._num_lists:
            # A graph over the centroids finds so many of them only if it keeps as many candidates.
            graph = faiss.SearchParametersHNSW(efSearch=2 * effort) if self._has_graph_of_lists else None
            params = faiss.SearchParametersIVF(nprobe=effort, sel=selector, quantizer_params=graph)
            is_wrapped = isinstance(self.index, faiss.IndexPreTransform)
            return faiss.SearchParametersPreTransform(index_params=params) if is_wrapped else params
        return None if selector is None else faiss.SearchParameters(sel=selector)


def best_rows(
    vectors: Vectors, query_BE: Scores, *, k: int, ids: Sequence[str], forbidden: Sequence[Rows] | None = None
) -> tuple[Scores, Rows]:
    """The k best rows (B, k) of each query, best first, ties by id, and their scores; -inf and -1 behind the last one.

    Args:
        ids: of the rows.
        forbidden: for each query, rows that it must not find.
    """
    num_queries, num_rows = len(query_BE), len(vectors)
    scores = numpy.full((num_queries, k), -numpy.inf, dtype=numpy.float32)
    rows = numpy.full((num_queries, k), -1, dtype=numpy.int64)
    num_forbidden = max(map(len, forbidden), default=0) if forbidden is not None else 0
    largest = min(num_rows, GPU_LARGEST) if vectors.on_gpu else num_rows
    margin = MARGIN if vectors.is_flat else MARGIN_OF_LISTS
    wide, effort = min(largest, k + num_forbidden + margin), vectors.effort
    left = numpy.arange(num_queries)
    while len(left) and wide:
        query = query_BE if len(left) == num_queries else query_BE[left]
        score, row = vectors.search(query, wide, effort)
        if forbidden is None and len(left) == num_queries and _is_plain(vectors, score, k):
            return score[:, :k], row[:, :k]
        ran_out = (row[:, -1] < 0) | (wide == num_rows)  # all that was visited has been fetched
        slack = numpy.zeros(len(left))
        if vectors.is_flat and not vectors.on_gpu:
            score, row, slack = _recomputed(vectors, query, score, row)
        if forbidden is not None:
            score, row = _without(score, row, [forbidden[i] for i in left.tolist()])
        width = min(k, wide)
        border = numpy.where(row < 0, numpy.inf, score).min(axis=1)
        settled = ran_out | (((row >= 0).sum(axis=1) > k) & (border < score[:, width - 1] - slack))
        if effort < vectors.most_effort:
            settled &= (row[:, :width] >= 0).all(axis=1) & (width == k)
        if wide == largest and effort == vectors.most_effort:
            settled[:] = True
        _order_ties(score, row, width, ids, where=settled)
        done = left[settled]
        scores[done, :width], rows[done, :width] = score[settled, :width], row[settled, :width]
        left = left[~settled]
        wide, effort = min(largest, 2 * wide), min(4 * effort, vectors.most_effort)
    return scores, rows


def _is_plain(vectors: Vectors, score_BW: Scores, k: int) -> bool:
    """Whether nothing is left to do: k were found for every query, and no two of them, nor the next, are equal.

    What was not found stands last, with equal scores; where that is the next alone, all that was visited is known.
    """
    return not vectors.is_flat and score_BW.shape[1] > k and bool((score_BW[:, :k] > score_BW[:, 1 : k + 1]).all())


def _recomputed(
    vectors: Vectors, query_BE: Scores, score_BW: Scores, row_BW: Rows
) -> tuple[Scores, Rows, NDArray[numpy.float64]]:
    """Scores of one pair at a time, in their order, and how far the others may be off (B,)."""
    exact = numpy.empty_like(score_BW)
    faiss.fvec_inner_products_by_idx(
        faiss.swig_ptr(exact), faiss.swig_ptr(query_BE), vectors.index.get_xb(),
        faiss.swig_ptr(numpy.ascontiguousarray(row_BW)), query_BE.shape[1], len(query_BE), row_BW.shape[1],
    )  # fmt: skip
    exact[row_BW < 0] = -numpy.inf
    there = row_BW >= 0
    difference = numpy.abs(numpy.subtract(exact, score_BW, where=there, out=numpy.zeros_like(exact)))
    order = numpy.argsort(-exact, axis=1, kind="stable")
    # Rounding of the rows that were not found: some times that of those that were, which are computed in both ways.
    slack = 4 * difference.max(axis=1).astype(numpy.float64)
    return numpy.take_along_axis(exact, order, 1), numpy.take_along_axis(row_BW, order, 1), slack


def _without(score_BW: Scores, row_BW: Rows, forbidden: Sequence[Rows]) -> tuple[Scores, Rows]:
    """What is allowed first, in its order; then -inf and -1."""
    bad = numpy.stack([numpy.isin(row, rows) for row, rows in zip(row_BW, forbidden, strict=True)])
    score_BW, row_BW = numpy.where(bad, -numpy.inf, score_BW).astype(numpy.float32), numpy.where(bad, -1, row_BW)
    order = numpy.argsort(row_BW < 0, axis=1, kind="stable")
    return numpy.take_along_axis(score_BW, order, 1), numpy.take_along_axis(row_BW, order, 1)


def _order_ties(score_BW: Scores, row_BW: Rows, k: int, ids: Sequence[str], *, where: NDArray[numpy.bool_]) -> None:
    """Put rows of equal scores into the order of their ids, in place, where that matters for the first k."""
    equal = (score_BW[:, 1:] == score_BW[:, :-1]) & (row_BW[:, 1:] >= 0)
    for b in numpy.nonzero(where & equal[:, :k].any(axis=1))[0]:
        there = row_BW[b] >= 0
        entries = sorted(
            (-s, ids[r], r) for s, r in zip(score_BW[b, there].tolist(), row_BW[b, there].tolist(), strict=True)
        )
        row_BW[b, : len(entries)] = [row for _, _, row in entries]
        score_BW[b, : len(entries)] = [-s for s, _, _ in entries]


def merged(score_BW: Scores, row_BW: Rows, *, k: int, ids: Sequence[str]) -> tuple[Scores, Rows]:
    """The k best of several answers side by side, ties by id."""
    score = numpy.full((len(score_BW), k), -numpy.inf, dtype=numpy.float32)
    row = numpy.full((len(score_BW), k), -1, dtype=numpy.int64)
    for b in range(len(score_BW)):
        there = row_BW[b] >= 0
        entries = sorted(
            (-s, ids[r], r) for s, r in zip(score_BW[b, there].tolist(), row_BW[b, there].tolist(), strict=True)
        )[:k]
        score[b, : len(entries)] = [-s for s, _, _ in entries]
        row[b, : len(entries)] = [r for _, _, r in entries]
    return score, row


def check_k(k: int, num_documents: int, *, forbidden: Sequence[Collection[str]] | None = None) -> None:
    """ValueError if there are not k documents, or may not be when some are forbidden."""
    if not 1 <= k <= num_documents:
        raise ValueError(f"k is {k}; the memory holds {num_documents} documents, so 1 to {num_documents} are allowed")
