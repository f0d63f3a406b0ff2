"""Global batches of a stream, and how much of it has been consumed.

A cursor is all that has to be kept of a position in the data: how many batches *finished* steps have consumed, and
a fingerprint of what decides their contents. It knows nothing of ranks or workers, nor of what was read ahead, so
training goes on with the very next batch on any number of either, and refuses data or settings that would give
another one.

Where an epoch does not divide into batches, the tail says what happens. *wrap*: a batch takes its rest from the
next epoch; nothing is lost, and one batch may hold a sample twice. *drop*: the rest of an epoch is left out, other
samples in each epoch. *pad*: the last batch is filled up with samples of weight 0, so that epochs end with a batch and
every sample counts once in each.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy

Tail = Literal["wrap", "pad", "drop"]


class Stream(Protocol):
    """An endless sequence of positions: `data.order.Order` or `data.mixture.Mixture`."""

    @property
    def num_samples(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def epoch_length(self) -> int | None: ...

    def stream(self, start: int, stop: int) -> numpy.ndarray: ...

    def runs(self, place: int) -> list[range]: ...

    def window_end(self, place: int) -> int: ...


@dataclass(frozen=True)
class Slots:
    """The places of one global batch.

    Attributes:
        positions: (B,) of the samples in their source, int64.
        weights: (B,) 1, or 0 for a slot that only fills up the last batch of an epoch.
    """

    positions: numpy.ndarray
    weights: numpy.ndarray


@dataclass(frozen=True)
class Cursor:
    """How far a stream has been consumed.

    Attributes:
        fingerprint: of what decides the batches; see `Batches.fingerprint`.
        batches: global batches that finished steps have consumed.
        samples: samples in them, those of weight 0 not counted.
    """

    fingerprint: str
    batches: int
    samples: int

    def to_json(self) -> dict[str, Any]:
        return {"fingerprint": self.fingerprint, "batches": self.batches, "samples": self.samples}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Cursor:
        """From what `to_json` gave.

        Raises:
            ValueError: if it is not that.
        """
        try:
            cursor = cls(str(value["fingerprint"]), int(value["batches"]), int(value["samples"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a cursor: {value!r} ({error})") from None
        return cursor


@dataclass(frozen=True)
class Batches:
    """Global batch n, as a pure function of the stream, the batch size, the tail and n.

    Attributes:
        source: the stream of samples.
        batch_size: B, samples of a global batch over all replicas and micro-batches.
        tail: what happens at the end of an epoch.
    """

    source: Stream
    batch_size: int
    tail: Tail = "wrap"

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be at least 1")
        if self.tail not in ("wrap", "pad", "drop"):
            raise ValueError(f"tail is {self.tail!r}; allowed are wrap, pad and drop")
        if self.tail == "wrap":
            return
        length = self.source.epoch_length
        if length is None:
            raise ValueError(
                f"tail is {self.tail!r}, but the sources of a mixture end their epochs at different places; use wrap"
            )
        if self.tail == "drop" and length < self.batch_size:
            raise ValueError(
                f"tail is 'drop', but an epoch of {length} samples is smaller than a batch of {self.batch_size}, so "
                "nothing would be left; use wrap or pad, or a smaller batch"
            )

    @property
    def fingerprint(self) -> str:
        """16 hex digits over everything that decides which samples batch n holds, but n."""
        text = f"{self.source.name}\nbatch {self.batch_size} tail {self.tail}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def _epoch(self) -> tuple[int, int] | None:
        """Samples and batches of an epoch; None with ``wrap``, where epochs do not end with a batch."""
        if self.tail == "wrap":
            return None
        length = self.source.epoch_length
        assert length is not None, "refused when built"
        return length, (length // self.batch_size if self.tail == "drop" else -(-length // self.batch_size))

    def place(self, n: int) -> int:
        """Place in the stream at which batch ``n`` begins."""
        if n < 0:
            raise ValueError(f"n is {n}; batches are counted from 0")
        if self._epoch is None:
            return n * self.batch_size
        length, batches = self._epoch
        return n // batches * length + n % batches * self.batch_size

    def at(self, n: int) -> Slots:
        """Global batch ``n`` (from 0), the same in every process."""
        start, weights = self.place(n), numpy.ones(self.batch_size, dtype=numpy.float32)
        if self.tail == "pad" and self._epoch is not None:
            length = self._epoch[0]
            left = length - start % length
            if left < self.batch_size:  # filled up with the first samples of the same epoch
                weights[left:] = 0.0
                first, more = start - start % length, self.batch_size - left
                filler = numpy.resize(self.source.stream(first, first + min(more, length)), more)
                return Slots(numpy.concatenate([self.source.stream(start, start + left), filler]), weights)
        return Slots(self.source.stream(start, start + self.batch_size), weights)

    def consumed(self, n: int) -> Cursor:
        """The cursor after ``n`` batches."""
        samples = n * self.batch_size
        if self.tail == "pad" and self._epoch is not None:
            length, batches = self._epoch
            samples = n // batches * length + n % batches * self.batch_size
        return Cursor(self.fingerprint, n, samples)

    def go_on(self, cursor: Cursor) -> int:
        """The batch that comes after what ``cursor`` says was consumed.

        Raises:
            ValueError: if it was taken on other data or with another seed, shuffle, mixture, batch size or tail.
        """
        if cursor.fingerprint != self.fingerprint:
            raise ValueError(
                f"the cursor is of another stream ({cursor.fingerprint}) than this one ({self.fingerprint}: "
                f"{self.source.name}, batch {self.batch_size}, tail {self.tail}); data, seed, shuffle, mixture, batch "
                "size and tail must be those it was taken with"
            )
        if self.consumed(cursor.batches) != cursor:
            raise ValueError(f"the cursor says {cursor.samples} samples in {cursor.batches} batches, which cannot be")
        return cursor.batches
