"""Several sources seen in fixed shares, exactly: after n samples each has had its share of n to within one.

Which source comes next is decided by no draw. The next sample goes, among the sources that are behind their share,
to the one that has to be served soonest (the earliest-deadline rule for fixed rates: Liu and Layland 1973; Baruah et
al. 1996 show that counts then stay between the share rounded down and up). Taking the source that is furthest
behind instead is simpler and strays by more than one. Within a source the order is its own, each of its epochs
complete before the next, so no source repeats a sample early because another one is larger.

Shares are kept as exact fractions and the pattern repeats after their common denominator, which is held as a table:
any place is found without walking there, and weights that need more than `MOST` places are refused.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy

from data.order import Order

MOST = 100_000  # places after which the pattern must repeat


def shares(weights: Mapping[str, float]) -> dict[str, Fraction]:
    """Each source's share of the samples, summing to 1; a weight counts as it is written, 0.1 as one tenth.

    Raises:
        ValueError: names the weight that is not above zero, or says that the common denominator is too large.
    """
    if not weights:
        raise ValueError("a mixture needs at least one source with a weight")
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"the weight of {name!r} is {weight}; it must be a number above 0 (leave the source out)")
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    total = sum(exact.values())
    result = {name: weight / total for name, weight in exact.items()}
    period = math.lcm(*(share.denominator for share in result.values()))
    if period > MOST:
        raise ValueError(
            f"the weights {', '.join(f'{n}: {w}' for n, w in weights.items())} repeat only after {period} samples; "
            f"at most {MOST} are allowed, so round them to shares with three or four digits that sum to 1"
        )
    return result


@functools.lru_cache(maxsize=8)
def pattern(parts: tuple[Fraction, ...]) -> numpy.ndarray:
    """Which source each place of one period is given to (period,), int64 and read-only.

    After n places source i has had between floor(n * parts[i]) and ceil(n * parts[i]) of them.
    """
    period = math.lcm(*(part.denominator for part in parts))
    served = [0] * len(parts)
    waiting = [(0, i) for i in range(len(parts))]  # place at which the next sample of i may come, and i
    ready: list[tuple[int, int]] = []  # place before which it must come, and i
    result = numpy.zeros(period, dtype=numpy.int64)
    for place in range(period):
        while waiting and waiting[0][0] <= place:
            _, i = heapq.heappop(waiting)
            heapq.heappush(ready, (math.ceil((served[i] + 1) / parts[i]), i))
        deadline, i = heapq.heappop(ready)
        assert deadline > place, "shares that sum to 1 can always be kept"
        result[place] = i
        served[i] += 1
        heapq.heappush(waiting, (math.floor(served[i] / parts[i]), i))
    result.setflags(write=False)
    return result


@functools.lru_cache(maxsize=8)
def _served(parts: tuple[Fraction, ...]) -> numpy.ndarray:
    """How often each source was served before each place of the period, and at its end (period + 1, sources)."""
    chosen = pattern(parts)
    counts = numpy.zeros((len(chosen) + 1, len(parts)), dtype=numpy.int64)
    counts[1:] = numpy.cumsum(chosen[:, None] == numpy.arange(len(parts)), axis=0)
    return counts


@dataclass(frozen=True)
class Mixture:
    """The endless stream over several sources; positions count through the sources laid end to end.

    Attributes:
        orders: of each source.
        parts: share of each source, summing to 1.
    """

    orders: tuple[Order, ...]
    parts: tuple[Fraction, ...]

    def __post_init__(self) -> None:
        if len(self.orders) != len(self.parts):
            raise ValueError(f"{len(self.orders)} orders and {len(self.parts)} shares; every source needs one of each")
        if sum(self.parts) != 1 or min(self.parts) <= 0:
            raise ValueError(f"the shares {', '.join(map(str, self.parts))} must be above 0 and sum to 1")

    @property
    def num_samples(self) -> int:
        """Of all sources."""
        return sum(order.num_samples for order in self.orders)

    @property
    def name(self) -> str:
        """What decides the order, as text: equal names, equal streams."""
        return "; ".join(f"{part} of {order.name}" for part, order in zip(self.parts, self.orders, strict=True))

    def counts(self, place: int) -> list[int]:
        """How many of the first ``place`` samples each source has given."""
        served = _served(self.parts)
        rounds, rest = divmod(place, len(served) - 1)
        return [int(n) for n in rounds * served[-1] + served[rest]]

    @property
    def epoch_length(self) -> None:
        """None: the sources end their epochs at different places."""
        return None

    def stream(self, start: int, stop: int) -> numpy.ndarray:
        """Positions (stop - start,) of the samples at places ``start`` to ``stop - 1``, int64."""
        if not 0 <= start <= stop:
            raise ValueError(f"start is {start} and stop {stop}; they must be at least 0, and stop not below start")
        chosen = pattern(self.parts)
        sources = chosen[numpy.arange(start, stop) % len(chosen)]
        result = numpy.zeros(stop - start, dtype=numpy.int64)
        before, base = self.counts(start), 0
        for i, order in enumerate(self.orders):
            mine = numpy.flatnonzero(sources == i)
            result[mine] = base + order.stream(before[i], before[i] + len(mine))
            base += order.num_samples
        return result

    def runs(self, place: int) -> list[range]:
        """The runs of consecutive positions that the sources' windows at ``place`` consist of."""
        found, base = [], 0
        for count, order in zip(self.counts(place), self.orders, strict=True):
            found += [range(base + run.start, base + run.stop) for run in order.runs(count)]
            base += order.num_samples
        return found

    def window_end(self, place: int) -> int:
        """A place after ``place`` at which a source begins another window."""
        ends = []
        for count, order, part in zip(self.counts(place), self.orders, self.parts, strict=True):
            ends.append(math.ceil((order.window_end(count) - count) / part))
        return place + max(1, min(ends))
