"""From shards to batches: global batch n, or a rank's part of it, read and decoded by worker processes.

Which samples a batch holds is decided by `data.cursor.Batches` alone; the loader only fetches them. So ranks and
workers change nothing, a cursor goes on anywhere, fewer shards than workers is no special case, and nobody waits for
a worker that has run out of data. A batch's samples are one batched read, and windows are announced to the file
system before they begin (`data.announcing`).

A sample that cannot be read or decoded keeps its slot with weight 0 and its reason: dropping it would shift all that
come after it.

    loader = Loader(partial(ShardSet, "train"), Batches(Order(...), 256), decode=to_tensors, num_workers=2)
    for batch in loader:
        step(batch)
        cursor = batch.after     # into the checkpoint, once the step is done; Loader(..., cursor=cursor) goes on
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy
from torch.utils.data._utils.pin_memory import pin_memory

from data.ahead import Ahead, WorkerError
from data.announcing import Announcer
from data.cursor import Batches, Cursor

__all__ = ["Batch", "Loader", "Part", "Source", "WorkerError"]

Item = TypeVar("Item")


class Source(Protocol):
    """Samples by position: `data.shard_set.ShardSet`."""

    def read(self, positions: Sequence[int]) -> Sequence[Any]: ...

    def will_need(self, positions: range) -> None:
        """These positions will be read soon, front to back; may do nothing."""
        ...


@dataclass(frozen=True)
class Part:
    """Which rows of a global batch are read here: the ``index``-th of ``count`` equal, adjacent parts."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"part {self.index} of {self.count} does not exist")

    def rows(self, batch_size: int) -> slice:
        """Rows of this part; ValueError if the batch does not divide."""
        if batch_size % self.count:
            raise ValueError(f"batch_size is {batch_size}; it must be a multiple of the {self.count} parts")
        size = batch_size // self.count
        return slice(self.index * size, (self.index + 1) * size)


@dataclass(frozen=True)
class Batch(Generic[Item]):
    """One global batch, or this rank's part of it, in the order of its slots.

    Attributes:
        n: its number in the stream.
        keys: of its samples.
        items: what ``decode`` made of each sample; None for one with a problem.
        weights: (rows,) 1; 0 for a sample with a problem and for slots that fill up the end of an epoch.
        problems: row -> why it has no item.
        after: the cursor once a step has consumed this batch.
    """

    n: int
    keys: list[str]
    items: list[Item | None]
    weights: numpy.ndarray
    problems: dict[int, str]
    after: Cursor

    def pin_memory(self) -> Batch[Item]:
        """The same with the items' tensors in pinned memory; torch's loader asks for it where there is a GPU."""
        return replace(self, items=pin_memory(self.items))


class _Fetch(Generic[Item]):
    """Reads and decodes batch n."""

    def __init__(
        self, source: Source, batches: Batches, part: Part, decode: Callable[[Any], Item], hints: bool, first: int
    ) -> None:
        self.source, self.batches, self.part, self.decode = source, batches, part, decode
        self.announcer = Announcer(batches, source.will_need, first=first) if hints else None

    def __call__(self, n: int) -> Batch[Item]:
        if self.announcer is not None:
            self.announcer.before(n)
        slots, rows = self.batches.at(n), self.part.rows(self.batches.batch_size)
        weights = slots.weights[rows].copy()
        samples = self.source.read(slots.positions[rows].tolist())
        items: list[Item | None] = []
        problems: dict[int, str] = {}
        for row, sample in enumerate(samples):
            reason, item = sample.problem, None
            if reason is None:
                try:
                    item = self.decode(sample)
                except ValueError as error:
                    reason = str(error) or "undecodable"
            if reason is not None:
                problems[row], weights[row] = reason, 0.0
            items.append(item)
        return Batch(n, [s.key for s in samples], items, weights, problems, self.batches.consumed(n + 1))


@dataclass(frozen=True)
class _Opener(Generic[Item]):
    """Makes a `_Fetch` in whichever process calls it."""

    open_source: Callable[[], Source]
    batches: Batches
    part: Part
    decode: Callable[[Any], Item]
    hints: bool
    first: int

    def __call__(self) -> _Fetch[Item]:
        return _Fetch(self.open_source(), self.batches, self.part, self.decode, self.hints, self.first)


def _require_picklable(**given: object) -> None:
    """ValueError naming what workers, which are processes of their own, cannot be handed."""
    for name, value in given.items():
        try:
            pickle.dumps(value)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{name} is {value!r}, which workers cannot be handed ({error}); give a function of a module or a "
                "functools.partial of one, or num_workers=0"
            ) from None


class Loader(Generic[Item]):
    """Batches from a cursor on, without end.

    Args:
        open_source: opens the samples, once in every worker (with workers: picklable).
        batches: which samples batch n holds.
        decode: makes an item of a sample that could be read; a ValueError is that sample's problem.
        cursor: what was consumed; default: nothing.
        part: the rows that are read here; default: all.
        num_workers: processes that read and decode; 0: this one.
        depth: batches that a worker has under way or ready.
        stop: number of the batch to end before, or None.
        hints: announce windows to the source.

    Raises:
        ValueError: if the cursor is of another stream, the batch does not divide into the parts, or workers cannot be
            handed ``open_source`` or ``decode``.
        WorkerError: from the iterator; see `data.ahead.Ahead`.
    """

    def __init__(
        self,
        open_source: Callable[[], Source],
        batches: Batches,
        *,
        decode: Callable[[Any], Item],
        cursor: Cursor | None = None,
        part: Part | None = None,
        num_workers: int = 0,
        depth: int = 2,
        stop: int | None = None,
        hints: bool = True,
    ) -> None:
        part = Part() if part is None else part
        part.rows(batches.batch_size)
        first = 0 if cursor is None else batches.go_on(cursor)
        if num_workers > 0:
            _require_picklable(open_source=open_source, decode=decode)
        self.batches = batches
        opener = _Opener(open_source, batches, part, decode, hints, first)
        self._ahead: Ahead[Batch[Item]] = Ahead(opener, start=first, stop=stop, num_workers=num_workers, depth=depth)

    def __iter__(self) -> Iterator[Batch[Item]]:
        return self._ahead

    def close(self) -> None:
        """End the workers."""
        self._ahead.close()
