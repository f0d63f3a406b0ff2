"""Time and memory of a run of blocks as one stage; shared by partition and simulation.

Memory of a stage counts live tensor bytes: its parameters times ``parameter_copies`` (parameter, gradient and
two Adam moments: 4; frozen ones once), activations of the micro-batches in flight, and the library's receive
buffers, which exist for all micro-batches of a shape signature at once. Allocator overhead and temporaries
within an operation are not in it.

Recomputed blocks (`pipeline.recomputation`) count on every stage that reads them, their parameters too.
Parameters that several ranks hold cost one all-reduce after the backward: twice their bytes over the link.

All tables are (n + 1, n + 1) arrays, [a, b] for the blocks a to b - 1 as a stage; a < b.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from pipeline.recomputation import reach, readers
from pipeline.trace import BlockProfile, Profile

Bounds = tuple[int, ...]  # of the stages: 0, ..., n


@dataclass(frozen=True)
class Link:
    """Connection between neighbouring stages: seconds a message, bytes a second."""

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")

    def __post_init__(self) -> None:
        if not self.latency_s >= 0 or not self.bytes_per_s > 0:
            raise ValueError(
                f"link latency is {self.latency_s} s and bandwidth {self.bytes_per_s} bytes/s; "
                "they must be at least 0 and above 0"
            )

    def seconds(self, num_bytes: float) -> float:
        """Time of one message; nothing to send takes none."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0


@dataclass(frozen=True)
class Beside:
    """What a rank holds for something else than its stages, such as the towers of a retriever.

    Attributes:
        static_bytes: all the time.
        working_bytes: at times when the pipeline has no micro-batch in flight.
    """

    static_bytes: int = 0
    working_bytes: int = 0


@dataclass(frozen=True)
class StageCost:
    """Blocks [first, last) as one stage, for one micro-batch.

    Attributes:
        static_bytes: parameters (times copies) and receive buffers.
        flight_bytes: activations held for each micro-batch in flight.
        send_bytes: to the next stage.
        return_bytes: gradients that come back from there.
        buffer_bytes: receive buffers of all micro-batches.
    """

    forward_s: float
    backward_s: float
    static_bytes: int
    flight_bytes: int
    send_bytes: int
    return_bytes: int
    buffer_bytes: int


@dataclass(frozen=True)
class Shared:
    """Parameters that the same blocks hold.

    Attributes:
        copies: kept of each byte.
        trained: they have a gradient, which is all-reduced if several ranks hold them.
        reach: a stage from a to b holds them where ``reach[a] < b``.
        first, last: they are on one stage if no cut c has ``first < c <= last``.
    """

    num_bytes: int
    copies: float
    trained: bool
    reach: np.ndarray
    first: int
    last: int


class Costs:
    """Costs of every possible stage of a profile, for a choice of recomputed blocks.

    Raises:
        ValueError: if ``recomputed`` does not fit the profile (see `pipeline.recomputation.readers`).
    """

    def __init__(
        self,
        profile: Profile,
        *,
        link: Link | None = None,
        parameter_copies: float = 4.0,
        recomputed: Collection[str] = (),
    ) -> None:
        self.profile, self.link, self.parameter_copies = profile, link or Link(), parameter_copies
        self.num_blocks = n = len(profile.blocks)
        self._again = readers(profile, recomputed)
        self._reaches = {j: np.where(np.arange(n + 1) > j, reach(found, n), n) for j, found in self._again.items()}
        dropped = {name for j in self._again for name in profile.blocks[j].writes}
        carries = profile.recomputable_carries or ({},) * n
        self.carry_bytes = tuple(
            size - sum(part for name, part in by_name.items() if name in dropped)
            for size, by_name in zip(profile.carry_bytes, carries, strict=True)
        )
        returned = profile.gradient_bytes or profile.carry_bytes
        # A block without a backward writes what needs no gradient.
        silent = {name for j in self._again if not profile.blocks[j].backward_s for name in profile.blocks[j].writes}
        self.return_bytes = tuple(
            size - sum(part for name, part in by_name.items() if name in dropped and name not in silent)
            for size, by_name in zip(returned, carries, strict=True)
        )
        self._carry = np.array([0, *self.carry_bytes[:-1], 0], dtype=np.int64)  # [c]: at the cut before block c
        self._return = np.array([0, *self.return_bytes[:-1], 0], dtype=np.int64)
        self.shared = self._shared()
        # Bytes of parameters that one block alone holds and one stage alone computes with.
        own = [0 if j in self._again else b.parameter_bytes - sum(b.ties.values()) for j, b in self._enumerate()]
        frozen = [min(size, b.frozen_bytes) for size, b in zip(own, profile.blocks, strict=True)]
        kept = [(size - f) * parameter_copies + f for size, f in zip(own, frozen, strict=True)]
        self._own_sums = np.concatenate([[0], np.cumsum(own)])
        self._kept_sums = np.concatenate([[0.0], np.cumsum(kept)])

    def _enumerate(self) -> list[tuple[int, BlockProfile]]:
        return list(enumerate(self.profile.blocks))

    def _shared(self) -> list[Shared]:
        holders: dict[str, set[int]] = {}
        sizes: dict[str, int] = {}
        frozen: set[str] = set()  # where a block that holds it trains nothing
        for j, block in self._enumerate():
            parts = dict(block.ties)
            alone = block.parameter_bytes - sum(block.ties.values())
            if j in self._again:
                still = min(alone, block.frozen_bytes)
                parts |= {f"\0{j}": alone - still, f"\0{j} frozen": still}
                frozen.add(f"\0{j} frozen")
            for name, size in parts.items():
                holders.setdefault(name, set()).add(j)
                sizes[name] = size
            frozen |= set(parts) if block.frozen_bytes == block.parameter_bytes else set()
        together: dict[tuple[frozenset[int], bool], int] = {}
        for name, found in holders.items():
            key = frozenset(found), name not in frozen
            together[key] = together.get(key, 0) + sizes[name]
        n, result = self.num_blocks, []
        for (blocks, trained), size in together.items():
            held = reach(blocks, n)
            for j in blocks & self._again.keys():
                held = np.minimum(held, self._reaches[j])
            last = max([*blocks, *(self._again[j][-1] for j in blocks & self._again.keys())])
            copies = self.parameter_copies if trained else 1.0
            result.append(Shared(size, copies, trained, held, min(blocks), last))
        return result

    def again(self, first: int, last: int) -> tuple[int, ...]:
        """Blocks before ``first`` that the stage [first, last) computes again."""
        return tuple(j for j in sorted(self._reaches) if self._reaches[j][first] < last)

    def stage(self, first: int, last: int) -> StageCost:
        """Cost of blocks [first, last); a parameter shared by several of them counts once."""
        blocks = [*(self.profile.blocks[j] for j in self.again(first, last)), *self.profile.blocks[first:last]]
        buffers = self.buffers(first, last)
        return StageCost(
            forward_s=sum(b.forward_s for b in blocks),
            backward_s=sum(b.backward_s for b in blocks),
            static_bytes=self.parameter_memory([(first, last)]) + buffers,
            flight_bytes=sum(b.activation_bytes + b.written_bytes for b in blocks),
            send_bytes=int(self._carry[last]),
            return_bytes=int(self._return[last]),
            buffer_bytes=buffers,
        )

    def buffers(self, first: int, last: int) -> int:
        """Received activations and their gradients, and received gradients of what is sent, of all micro-batches."""
        return int(self.profile.num_microbatches * (self._carry[first] + self._return[first] + self._return[last]))

    def parameter_memory(self, stages: Sequence[tuple[int, int]]) -> int:
        """Bytes of parameters and their copies on a rank that holds these stages; shared ones count once."""
        alone = sum(float(self._kept_sums[b] - self._kept_sums[a]) for a, b in stages)
        held = [group for group in self.shared if any(group.reach[a] < b for a, b in stages)]
        return int(alone + sum(group.num_bytes * group.copies for group in held))

    def tie_bytes(self, bounds: Bounds, *, num_ranks: int) -> int:
        """Trained parameters that several ranks hold."""
        total = 0
        for group in self.shared:
            if not group.trained:
                continue
            ranks = {s % num_ranks for s, (a, b) in enumerate(pairwise(bounds)) if group.reach[a] < b}
            total += group.num_bytes if len(ranks) > 1 else 0
        return total

    def tie_seconds(self, bounds: Bounds, *, num_ranks: int) -> float:
        """Time of the all-reduce after the backward; 0 if nothing is tied over ranks."""
        return self.link.seconds(2 * self.tie_bytes(bounds, num_ranks=num_ranks))

    @cached_property
    def _valid(self) -> np.ndarray:
        order = np.arange(self.num_blocks + 1)
        return order[:, None] < order[None, :]

    def _table(self, values: Sequence[float]) -> np.ndarray:
        """Sums over each stage's blocks, computed again or its own."""
        sums = np.concatenate([[0], np.cumsum(values)])
        table = sums[None, :] - sums[:, None]
        ends = np.arange(self.num_blocks + 1)
        for j, to in self._reaches.items():
            table = table + values[j] * (to[:, None] < ends[None, :])
        return table

    @cached_property
    def forward_s(self) -> np.ndarray:
        return self._table([b.forward_s for b in self.profile.blocks])

    @cached_property
    def backward_s(self) -> np.ndarray:
        return self._table([b.backward_s for b in self.profile.blocks])

    @cached_property
    def send_s(self) -> np.ndarray:
        """(n + 1): one way over the cut before each block."""
        return np.array([self.link.seconds(int(c)) for c in self._carry])

    @cached_property
    def return_s(self) -> np.ndarray:
        """(n + 1): the gradients' way back over the cut before each block."""
        return np.array([self.link.seconds(int(c)) for c in self._return])

    @cached_property
    def time_s(self) -> np.ndarray:
        """Forward, backward, and sending the carry and its gradient; infinite where b <= a."""
        total = self.forward_s + self.backward_s + (self.send_s + self.return_s)[None, :]
        return np.where(self._valid, total, np.inf)

    @cached_property
    def parameter_bytes(self) -> np.ndarray:
        """Parameters of each stage, each once."""
        table = self._own_sums[None, :] - self._own_sums[:, None]
        ends = np.arange(self.num_blocks + 1)
        for group in self.shared:
            table = table + group.num_bytes * (group.reach[:, None] < ends[None, :])
        return table

    @cached_property
    def static_bytes(self) -> np.ndarray:
        kept = self._kept_sums[None, :] - self._kept_sums[:, None]
        ends = np.arange(self.num_blocks + 1)
        for group in self.shared:
            kept = kept + group.num_bytes * group.copies * (group.reach[:, None] < ends[None, :])
        received = (self._carry + self._return)[:, None] + self._return[None, :]
        return np.floor(kept).astype(np.int64) + self.profile.num_microbatches * received

    @cached_property
    def flight_bytes(self) -> np.ndarray:
        return self._table([b.activation_bytes + b.written_bytes for b in self.profile.blocks])

    def memory(self, flights: int) -> np.ndarray:
        """Peak bytes of every stage with so many micro-batches in flight."""
        return self.static_bytes + flights * self.flight_bytes
