"""Random profiles, and the slow, obvious count of what a stage of them costs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from pipeline import Profile
from pipeline.costs import Link
from pipeline.trace import BlockProfile


def block_profile(name: str, forward_s: float = 1.0, backward_s: float = 2.0, **fields: object) -> BlockProfile:
    """A block with these costs; bytes are 0 unless given."""
    values: dict[str, object] = {
        "flops": 0, "parameter_bytes": 0, "activation_bytes": 0, "written_bytes": 0, "lineage": "sample",
        "stateful": False, "mixes": "", "ties": {},
    }  # fmt: skip
    return BlockProfile(name, forward_s, backward_s, **{**values, **fields})  # type: ignore[arg-type]


def random_profile(n: int, num_microbatches: int, rng: random.Random, *, num_recomputable: int = 0) -> Profile:
    """Ties in many blocks, few distinct times (so that plans tie), some blocks recomputable by chains."""
    again = set(rng.sample(range(n - 1), min(num_recomputable, n - 1)))
    reads: list[list[str]] = [[] for _ in range(n)]
    last_reader, sizes = {}, {}
    for j in sorted(again):
        who = rng.sample(range(j + 1, n), rng.randint(1, n - j - 1))
        for i in who:
            reads[i].append(f"r{j}")
        last_reader[j], sizes[j] = max(who), rng.choice([10, 200, rng.randrange(1000)])

    def block(i: int) -> BlockProfile:
        ties = {name: size for name, size in (("t", 50), ("u", 30)) if rng.random() < 0.3}
        return block_profile(
            f"b.{i}",
            rng.choice([1.0, 2.0, rng.random()]),
            rng.choice([2.0, rng.random()]),
            parameter_bytes=rng.randrange(80, 130),
            activation_bytes=rng.randrange(100),
            written_bytes=rng.randrange(100),
            ties=ties,
            recomputable=i in again,
            reads=tuple(reads[i]),
            writes=(f"r{i}",) if i in again else ("h",),
        )

    carries = [{f"r{j}": sizes[j] for j in again if j <= i < last_reader[j]} for i in range(n - 1)]
    carry = [rng.choice([0, 10, 100, rng.randrange(1000)]) + sum(by_name.values()) for by_name in carries]
    return Profile(
        tuple(block(i) for i in range(n)), (*carry, 0), num_microbatches, num_microbatches,
        recomputable_carries=(*carries, {}), outputs=("h",),
    )  # fmt: skip


@dataclass(frozen=True)
class SlowStage:
    """One stage of a plan, counted block by block."""

    forward_s: float
    backward_s: float
    send_s: float
    parameters: dict[str, int]
    buffer_bytes: int
    flight_bytes: int

    @property
    def time_s(self) -> float:
        return self.forward_s + self.backward_s + 2 * self.send_s


def slow_stages(profile: Profile, bounds: tuple[int, ...], recomputed: Collection[str], link: Link) -> list[SlowStage]:
    blocks = profile.blocks
    dropped = {name for b in blocks if b.name in recomputed for name in b.writes}

    def carry(cut: int) -> int:
        by_name = profile.recomputable_carries[cut - 1]
        return profile.carry_bytes[cut - 1] - sum(size for name, size in by_name.items() if name in dropped)

    stages = []
    for first, last in itertools.pairwise(bounds):
        here = set(range(first, last))
        for j in reversed(range(first)):
            if blocks[j].name in recomputed and any(set(blocks[j].writes) & set(blocks[i].reads) for i in here):
                here.add(j)
        parameters = {}
        for i in here:
            parameters[f"own {i}"] = blocks[i].parameter_bytes - sum(blocks[i].ties.values())
            parameters.update(blocks[i].ties)
        before = carry(first) if first else 0
        after = carry(last) if last < len(blocks) else 0
        stages.append(
            SlowStage(
                sum(blocks[i].forward_s for i in sorted(here)),
                sum(blocks[i].backward_s for i in sorted(here)),
                link.seconds(after),
                parameters,
                profile.num_microbatches * (2 * before + after),
                sum(blocks[i].activation_bytes + blocks[i].written_bytes for i in here),
            )
        )
    return stages


def slow_tie_seconds(stages: list[SlowStage], link: Link, *, num_ranks: int) -> float:
    holders: dict[str, set[int]] = {}
    sizes: dict[str, int] = {}
    for s, stage in enumerate(stages):
        for name, size in stage.parameters.items():
            holders.setdefault(name, set()).add(s % num_ranks)
            sizes[name] = size
    return link.seconds(2 * sum(sizes[name] for name, ranks in holders.items() if len(ranks) > 1))


def recomputed_sets(profile: Profile) -> Iterator[tuple[str, ...]]:
    """Every set of recomputable blocks that contains what its members read."""
    able = [b for b in profile.blocks if b.recomputable]
    writer = {name: b.name for b in able for name in b.writes}
    for size in range(len(able) + 1):
        for some in itertools.combinations(able, size):
            names = {b.name for b in some}
            if all(writer[name] in names for b in some for name in b.reads if name in writer):
                yield tuple(b.name for b in some)
