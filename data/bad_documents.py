"""Counting documents that are damaged in their store.

A store of tens of millions of documents has some that cannot be read: a shard became shorter, a record is not JSON, a
picture does not decode. A run must not end by the first of them, nor go on when they are many. So such a document is
read as an empty one (or without its picture, if that is all), alike on every rank; and it counts, by reason and by
shard (`data.bad_data`).

The price of counting each document once is a byte a document and process.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy
from numpy.typing import NDArray

from data.bad_data import BadData


class BadDocuments(BadData):
    """Damaged documents among those that were read. Unlike samples, documents have no epochs: it counts on.

    Attributes:
        found: what is wrong with each damaged document, by id.
    """

    def __init__(self, name: str, *, total: int) -> None:
        """``total``: documents in the shards; those added since are counted behind them."""
        super().__init__(name, total=total, fate="documents are read without what is damaged of them")

    def start_epoch(self, begun: Iterable[int] = ()) -> None:
        super().start_epoch(begun)
        self.found: dict[str, str] = {}

    def record(self, position: int, problem: str | None, *, key: str, shard: Path) -> None:
        if problem is not None:
            self.found.setdefault(key, problem)
        with self._lock:
            self._make_room(numpy.array([position]))
        super().record(position, problem, key=key, shard=shard)

    def count(self, positions: NDArray[numpy.int64]) -> None:
        """Documents at these positions were read, and are good as far as is known."""
        with self._lock:
            self._make_room(positions)
            new = numpy.unique(positions[self._state[positions] == 0])
            self._state[new] = 1
            self.num_read += len(new)

    def count_all(self) -> None:
        """All documents were read, by the processes of a job together."""
        self.count(numpy.arange(self._total))

    def _make_room(self, positions: NDArray[numpy.int64]) -> None:
        last = int(positions.max(initial=-1))
        if last >= len(self._state):
            self._total = last + 1
            self._state = numpy.concatenate([self._state, numpy.zeros(self._total - len(self._state), numpy.uint8)])
