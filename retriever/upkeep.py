"""Taking rows out of a faiss index and putting others in, without embedding or training anything.

Lists of an IVF index are copied without the rows that go; a graph is built anew from its own vectors, since none of
its edges may lead to what is gone.
"""

from __future__ import annotations

from typing import Any

import numpy

from retriever.faiss_import import faiss
from retriever.search import Rows, Scores
from retriever.vector_files import inverted_lists


def without_rows(vectors: Any, rows: Rows, fresh: Scores) -> Any:
    """A faiss index of some rows of another, numbered anew, and fresh vectors behind them."""
    if hasattr(vectors, "hnsw"):
        graph = faiss.clone_index(vectors)
        graph.reset()
        for start in range(0, len(rows), 1 << 16):
            graph.add(numpy.stack([vectors.storage.reconstruct(r) for r in rows[start : start + (1 << 16)].tolist()]))
        graph.add(fresh)
        return graph
    new = _emptied(vectors)
    old_lists = faiss.downcast_InvertedLists(inverted_lists(vectors).invlists)
    lists = inverted_lists(new)
    number = numpy.full(vectors.ntotal, -1, dtype=numpy.int64)
    number[rows] = numpy.arange(len(rows))
    for i in range(old_lists.nlist):
        size = old_lists.list_size(i)
        if not size:
            continue
        names = number[faiss.rev_swig_ptr(old_lists.get_ids(i), size)]
        codes = faiss.rev_swig_ptr(old_lists.get_codes(i), size * old_lists.code_size).reshape(size, -1)
        keep = names >= 0
        if keep.any():
            names, codes = numpy.ascontiguousarray(names[keep]), numpy.ascontiguousarray(codes[keep])
            lists.invlists.add_entries(i, len(names), faiss.swig_ptr(names), faiss.swig_ptr(codes))
    lists.ntotal = new.ntotal = len(rows)
    new.add_with_ids(fresh, numpy.arange(len(rows), len(rows) + len(fresh)))
    return new


def _emptied(vectors: Any) -> Any:
    """A copy of an IVF index without its vectors, whose lists faiss could not copy where they lie on the disk."""
    ivf = inverted_lists(vectors)
    lists, owned = ivf.invlists, ivf.own_invlists
    nothing = faiss.ArrayInvertedLists(ivf.nlist, lists.code_size)
    ivf.own_invlists = False  # else they would be freed
    try:
        ivf.replace_invlists(nothing, False)
        new = faiss.clone_index(vectors)
    finally:
        ivf.replace_invlists(lists, owned)
    new.reset()
    return new
