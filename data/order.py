"""In which order samples are seen: a pure function of (data fingerprint, seed, epoch), whatever reads them.

Nothing about order is stored in a checkpoint but how much of it was consumed. Two levels of shuffling make it good
and cheap to read: *chunks* of consecutive samples are permuted over the whole epoch, then the samples of a *window*
of some dozen chunks are permuted among themselves. The files that a window touches are at most twice its chunks, and
what is read of each is one run of neighbours, so a parallel file system sees few opens and near-sequential reads,
while two samples that follow one another come from one chunk only once in as many times as a window has chunks.
Where the data set is not larger than a window, this is the full permutation.

The price: two samples of one chunk are never further apart than a window. Data whose neighbours resemble each
other over longer stretches than a chunk (sorted by source) mixes as well as its chunks do, no better. In memory are
one permutation of chunks (8 bytes a chunk: 31 MB at 1e9 samples) and those of the last few windows; any place of any
epoch is found without walking there.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import numpy

CHUNK, WINDOW = 256, 64 * 256  # samples


def permutation(size: int, key: str) -> numpy.ndarray:
    """The permutation (size,) that ``key`` names, int64 and read-only."""
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    generator = numpy.random.Generator(numpy.random.Philox(key=int.from_bytes(digest, "little")))
    order = generator.permutation(size)
    order.setflags(write=False)
    return order


@dataclass(frozen=True)
class Order:
    """The endless stream of one source's samples: epoch after epoch without a gap, each sample once in each.

    Attributes:
        num_samples: of the source, and so the length of an epoch.
        fingerprint: of the data; other data, other order.
        seed: of the run.
        chunk: consecutive samples that are read together.
        window: samples that are shuffled among each other, a whole number of chunks; a data set that is not larger
            is permuted as a whole.
    """

    num_samples: int
    fingerprint: str
    seed: int
    chunk: int = CHUNK
    window: int = WINDOW

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"num_samples is {self.num_samples}; an order needs at least one sample")
        if self.chunk < 1 or self.window < self.chunk or self.window % self.chunk:
            raise ValueError(
                f"chunk is {self.chunk} and window {self.window}; a chunk has at least one sample and a window is "
                "a whole number of chunks"
            )

    @property
    def name(self) -> str:
        """What decides the order, as text: equal names, equal streams."""
        whole = self.num_samples <= self.window
        how = "whole" if whole else f"chunk {self.chunk} window {self.window}"
        return f"{self.fingerprint} seed {self.seed} samples {self.num_samples} {how}"

    @property
    def epoch_length(self) -> int:
        """Samples of an epoch."""
        return self.num_samples

    def stream(self, start: int, stop: int) -> numpy.ndarray:
        """Positions (stop - start,) of the samples at places ``start`` to ``stop - 1`` of the stream, int64."""
        if not 0 <= start <= stop:
            raise ValueError(f"start is {start} and stop {stop}; they must be at least 0, and stop not below start")
        parts = [numpy.zeros(0, dtype=numpy.int64)]
        while start < stop:
            epoch, offset = divmod(start, self.num_samples)
            first, window = self._window_at(epoch, offset)
            part = window[offset - first : offset - first + stop - start]
            parts.append(part)
            start += len(part)
        return numpy.concatenate(parts)

    def runs(self, place: int) -> list[range]:
        """The runs of consecutive positions that the window at ``place`` of the stream consists of, ascending."""
        epoch, offset = divmod(place, self.num_samples)
        if self.num_samples <= self.window:
            return [range(self.num_samples)]
        return [self._run(chunk) for chunk in sorted(self._chunks(epoch, self._number(epoch, offset)).tolist())]

    def window_end(self, place: int) -> int:
        """Place of the stream at which the window after the one at ``place`` begins."""
        epoch, offset = divmod(place, self.num_samples)
        first, window = self._window_at(epoch, offset)
        return epoch * self.num_samples + first + len(window)

    def _window_at(self, epoch: int, offset: int) -> tuple[int, numpy.ndarray]:
        """Where in the epoch the window that holds ``offset`` begins, and its samples in their order."""
        if self.num_samples <= self.window:
            return 0, epoch_order(self.num_samples, fingerprint=self.fingerprint, seed=self.seed, epoch=epoch)
        number = self._number(epoch, offset)
        return self._start(epoch, self._bound(number)), _window_order(self, epoch, number)

    @property
    def num_chunks(self) -> int:
        return -(-self.num_samples // self.chunk)

    @property
    def num_windows(self) -> int:
        """Windows of an epoch; they differ by at most one chunk, so that none is too small to mix."""
        return -(-self.num_chunks // (self.window // self.chunk))

    def _bound(self, number: int) -> int:
        """Place among the epoch's chunks at which window ``number`` begins."""
        return number * self.num_chunks // self.num_windows

    def _start(self, epoch: int, place: int) -> int:
        """Samples before the chunk at ``place`` of the epoch: the last chunk of the data may be a short one."""
        short_place = _chunk_order(self, epoch)[1]
        missing = self.num_chunks * self.chunk - self.num_samples
        return place * self.chunk - (missing if place > short_place else 0)

    def _number(self, epoch: int, offset: int) -> int:
        """The window that holds sample ``offset`` of the epoch."""
        short_place = _chunk_order(self, epoch)[1]
        if offset < self._start(epoch, short_place + 1):
            place = min(offset // self.chunk, short_place)
        else:
            place = (offset + self.num_chunks * self.chunk - self.num_samples) // self.chunk
        return ((place + 1) * self.num_windows - 1) // self.num_chunks  # the last whose bound is not above place

    def _chunks(self, epoch: int, number: int) -> numpy.ndarray:
        return _chunk_order(self, epoch)[0][self._bound(number) : self._bound(number + 1)]

    def _run(self, chunk: int) -> range:
        return range(chunk * self.chunk, min((chunk + 1) * self.chunk, self.num_samples))

    def _key(self, epoch: int, what: str) -> str:
        return f"{self.fingerprint}\n{self.seed}\n{epoch}\n{what}"


@functools.lru_cache(maxsize=4)
def epoch_order(num_samples: int, *, fingerprint: str, seed: int, epoch: int) -> numpy.ndarray:
    """The full permutation (num_samples,) of one epoch, int64 and read-only: the order of a small data set."""
    return permutation(num_samples, f"{fingerprint}\n{seed}\n{epoch}")


@functools.lru_cache(maxsize=4)
def _chunk_order(order: Order, epoch: int) -> tuple[numpy.ndarray, int]:
    """The chunks of an epoch in their order, and the place of the data's last one."""
    chunks = permutation(order.num_chunks, order._key(epoch, "chunks"))
    return chunks, int(numpy.argmax(chunks == order.num_chunks - 1))


@functools.lru_cache(maxsize=8)
def _window_order(order: Order, epoch: int, number: int) -> numpy.ndarray:
    """Positions of the samples of a window, in their order, read-only."""
    positions = numpy.concatenate(
        [numpy.arange(r.start, r.stop) for r in map(order._run, order._chunks(epoch, number))]
    )
    shuffled = positions[permutation(len(positions), order._key(epoch, f"window {number}"))]
    shuffled.setflags(write=False)
    return shuffled


@dataclass(frozen=True)
class Sequential:
    """The stream without a shuffle, epoch after epoch: for passes whose order does not matter.

    Attributes:
        num_samples: of the source, and so the length of an epoch.
        fingerprint: of the data.
        window: samples that are announced to the file system at a time.
    """

    num_samples: int
    fingerprint: str
    window: int = WINDOW

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.window < 1:
            raise ValueError(f"num_samples is {self.num_samples} and window {self.window}; both must be at least 1")

    @property
    def name(self) -> str:
        """What decides the order, as text: equal names, equal streams."""
        return f"{self.fingerprint} in order, samples {self.num_samples}"

    @property
    def epoch_length(self) -> int:
        """Samples of an epoch."""
        return self.num_samples

    def stream(self, start: int, stop: int) -> numpy.ndarray:
        """Positions (stop - start,) of the samples at places ``start`` to ``stop - 1`` of the stream, int64."""
        return numpy.arange(start, stop) % self.num_samples

    def runs(self, place: int) -> list[range]:
        """The window at ``place``, one run."""
        start = place % self.num_samples // self.window * self.window
        return [range(start, min(start + self.window, self.num_samples))]

    def window_end(self, place: int) -> int:
        """Place of the stream at which the window after the one at ``place`` begins."""
        return place - place % self.num_samples + self.runs(place)[0].stop
