"""Fusion of two orders, worked out by hand."""

import pytest

from retriever.config import RetrieverConfig
from retriever.hybrid import fuse

DENSE = ([["a", "b", "c"]], [[0.9, 0.5, 0.1]])
WORDS = ([["c", "d"]], [[12.0, 4.0]])


def test_reciprocal_ranks():
    ids, scores = fuse(DENSE, WORDS, how="reciprocal_rank", weight=0.5, k=4)
    assert ids == [["c", "a", "b", "d"]]  # c: (1/63 + 1/61) / 2; b and d tie, and b comes first
    assert scores[0] == pytest.approx([(1 / 63 + 1 / 61) / 2, 1 / 122, 1 / 124, 1 / 124])


def test_weighted_sums():
    ids, scores = fuse(DENSE, WORDS, how="weighted_sum", weight=0.25, k=3)
    assert ids == [["a", "b", "c"]] and scores[0] == pytest.approx([0.75, 0.375, 0.25])
    assert fuse(DENSE, WORDS, how="weighted_sum", weight=1.0, k=1)[0] == [["c"]]
    assert fuse(DENSE, ([[]], [[]]), how="weighted_sum", weight=0.5, k=3)[0] == [["a", "b", "c"]]


def test_options_are_checked():
    with pytest.raises(ValueError, match=r"retriever\.hybrid_weight is 2; it must be from 0"):
        RetrieverConfig(hybrid_weight=2)
    with pytest.raises(ValueError, match=r"retriever\.hybrid_depth is 1; it must be at least retriever\.k \(2\)"):
        RetrieverConfig(hybrid="weighted_sum", hybrid_depth=1)
