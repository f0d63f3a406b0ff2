"""A second look at what the index proposes: L documents embedded anew, the best k of them kept.

An index that is some steps old still knows which documents are near, not in which order they now are. Embedding all L
proposals of a batch with the current weights costs as much as reading them does the towers, whatever the memory's size;
its gain is that the k that are read are the current best of the L.

Shapes: B questions, L proposals and k documents a question, U different proposals, E embedding width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Found = tuple[list[list[str]], Tensor]  # ids, best first, and the index's scores of them


def rerank(query_BE: Tensor, found: Found, *, k: int, embed: Callable[[Sequence[str]], Tensor]) -> Found:
    """The k proposals of each question that score highest now, best first, ties by id, with the index's scores (B, k).

    Args:
        found: L proposals of each question.
        embed: current embeddings (U, E) of documents by id.
    """
    proposed, searched_BL = found
    names = sorted({name for row in proposed for name in row})
    place = {name: i for i, name in enumerate(names)}
    now_BU = query_BE @ embed(names).T
    ids: list[list[str]] = []
    chosen: list[list[int]] = []
    for b, row in enumerate(proposed):
        score = now_BU[b, [place[name] for name in row]].tolist()
        order = sorted(range(len(row)), key=lambda i: (-score[i], row[i]))[:k]
        ids.append([row[i] for i in order])
        chosen.append(order)
    return ids, searched_BL.gather(1, torch.tensor(chosen))
