"""Time and memory of a run of blocks as one stage; shared by partition and simulation.

Memory of a stage counts live tensor bytes: its parameters times ``parameter_copies`` (parameter,
gradient and two Adam moments: 4), activations of the micro-batches in flight, and the library's receive
buffers, which exist for all micro-batches of a shape signature at once. Allocator overhead and
temporaries within an operation are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.trace import Profile


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
class StageCost:
    """Blocks [first, last) as one stage, for one micro-batch.

    Attributes:
        static_bytes: parameters (times copies) and receive buffers.
        flight_bytes: activations held for each micro-batch in flight.
    """

    forward_s: float
    backward_s: float
    static_bytes: int
    flight_bytes: int
    send_bytes: int


def in_flight(stage: int, *, num_stages: int, num_microbatches: int, schedule: str) -> int:
    """Micro-batches whose activations a stage holds at most."""
    return num_microbatches if schedule == "gpipe" else min(num_microbatches, num_stages - stage)


def stage_cost(profile: Profile, first: int, last: int, *, num_microbatches: int, parameter_copies: float) -> StageCost:
    """Cost of blocks [first, last); a parameter shared by several of them counts once."""
    blocks = profile.blocks[first:last]
    parameters, seen = 0, set()
    for block in blocks:
        parameters += block.parameter_bytes - sum(size for name, size in block.ties.items() if name in seen)
        seen |= set(block.ties)
    before = profile.carry_bytes[first - 1] if first else 0
    after = profile.carry_bytes[last - 1] if last < len(profile.blocks) else 0
    # Received activations and their gradients, and received gradients of what is sent.
    buffers = num_microbatches * (2 * before + after)
    return StageCost(
        forward_s=sum(b.forward_s for b in blocks),
        backward_s=sum(b.backward_s for b in blocks),
        static_bytes=int(parameters * parameter_copies) + buffers,
        flight_bytes=sum(b.activation_bytes + b.written_bytes for b in blocks),
        send_bytes=after,
    )


@dataclass(frozen=True)
class CostTable:
    """Costs of every [a, b) at once: (n + 1, n + 1) arrays, infinite (time) where b <= a."""

    time_s: np.ndarray
    static_bytes: np.ndarray
    flight_bytes: np.ndarray

    @classmethod
    def of(cls, profile: Profile, *, link: Link, num_microbatches: int, parameter_copies: float) -> CostTable:
        n = len(profile.blocks)
        compute = np.concatenate([[0.0], np.cumsum([b.forward_s + b.backward_s for b in profile.blocks])])
        flight = np.concatenate([[0], np.cumsum([b.activation_bytes + b.written_bytes for b in profile.blocks])])
        carry = np.array([0, *profile.carry_bytes[: n - 1], 0], dtype=np.int64)  # carry[c]: at the cut before c
        send = np.array([2 * link.seconds(c) for c in carry])  # there, and its gradient back
        order = np.arange(n + 1)
        valid = order[:, None] < order[None, :]
        time_s = np.where(valid, compute[None, :] - compute[:, None] + send[None, :], np.inf)
        parameters = np.zeros((n + 1, n + 1))
        for a in range(n):
            total, seen = 0, set()
            for b in range(a, n):
                block = profile.blocks[b]
                total += block.parameter_bytes
                for name, size in block.ties.items():
                    total -= size if name in seen else 0
                    seen.add(name)
                parameters[a, b + 1] = total
        buffers = num_microbatches * (2 * carry[:, None] + carry[None, :])
        static = np.floor(parameters * parameter_copies).astype(np.int64) + buffers
        return cls(time_s, static, flight[None, :] - flight[:, None])

    def memory(self, flights: int) -> np.ndarray:
        """Peak bytes of every [a, b) with so many micro-batches in flight."""
        return self.static_bytes + flights * self.flight_bytes
