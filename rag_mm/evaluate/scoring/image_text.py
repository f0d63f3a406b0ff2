"""Ranks of image-text retrieval: where the first matching text of an image stands, and the image of a text.

Hit@k of CLIP-like papers ("recall@k" there): 1 where any matching item is among the first k. Ties decide figures of
coarse scores (half precision, quantised indexes), so they are named:

``pessimistic``: every item that does not match and scores the same stands before. No luck in it, and no reward for a
model that gives everything the same score. ``by_order``: equal scores stand in the order of the candidates.

An image without any text, or a text without image, has no rank and is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy
from numpy.typing import NDArray

Ties = Literal["pessimistic", "by_order"]
Ranks = NDArray[numpy.int64]


def ranks_from_scores(
    scores_QC: NDArray[numpy.floating], owner_Q: NDArray[numpy.int64], owner_C: NDArray[numpy.int64], *, ties: Ties
) -> Ranks:
    """Rank, from 1, of the first matching candidate of each query.

    Args:
        scores_QC: higher is better.
        owner_Q, owner_C: which image each query and each candidate belongs to; equal numbers match.
        ties: see the module.

    Raises:
        ValueError: if a score is NaN, or a query matches no candidate.
    """
    if numpy.isnan(scores_QC).any():
        query, candidate = numpy.argwhere(numpy.isnan(scores_QC))[0]
        raise ValueError(f"the score of query {query} and candidate {candidate} is NaN")
    matches = owner_Q[:, None] == owner_C[None, :]
    if not matches.any(axis=1).all():
        raise ValueError(f"query {int(numpy.flatnonzero(~matches.any(axis=1))[0])} matches no candidate")
    best = numpy.where(matches, scores_QC, -numpy.inf).max(axis=1, keepdims=True)
    above = (scores_QC > best).sum(axis=1)  # none of them matches: best is the highest that does
    equal = scores_QC == best
    if ties == "pessimistic":
        return above + (equal & ~matches).sum(axis=1) + 1
    first = (equal & matches).argmax(axis=1)
    before = numpy.arange(scores_QC.shape[1])[None, :] < first[:, None]
    return above + (equal & before).sum(axis=1) + 1


def rank_in_list(ranked: Sequence[str], right: set[str]) -> int | None:
    """Rank, from 1, of the first right item of a list; None if it holds none."""
    return next((rank for rank, item in enumerate(ranked, start=1) if item in right), None)


def folds(num_images: int, *, size: int) -> NDArray[numpy.int64]:
    """The fold of each image, in order: the first ``size`` images are fold 0, and so on.

    Raises:
        ValueError: if the images do not fill whole folds.
    """
    if num_images % size:
        raise ValueError(f"{num_images} images do not fill folds of {size}")
    return numpy.arange(num_images) // size
