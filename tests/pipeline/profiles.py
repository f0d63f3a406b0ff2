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

    frozen = {i: rng.randrange(20) for i in range(n) if rng.random() < 0.3}

    def block(i: int) -> BlockProfile:
        ties = {name: size for name, size in (("t", 50), ("u", 30)) if rng.random() < 0.3}
        size = rng.randrange(80, 130)
        return block_profile(
            f"b.{i}",
            rng.choice([1.0, 2.0, rng.random()]),
            rng.choice([2.0, rng.random()]),
            parameter_bytes=size,
            activation_bytes=rng.randrange(100),
            written_bytes=rng.randrange(100),
            ties=ties,
            frozen_bytes=min(frozen.get(i, 0), size - sum(ties.values())),
            recomputable=i in again,
            reads=tuple(reads[i]),
            writes=(f"r{i}",) if i in again else ("h",),
        )

    carries = [{f"r{j}": sizes[j] for j in again if j <= i < last_reader[j]} for i in range(n - 1)]
    carry = [rng.choice([0, 10, 100, rng.randrange(1000)]) + sum(by_name.values()) for by_name in carries]
    # Masks need no gradient; what the recomputable blocks write does, since they all have a backward.
    back = [
        rng.choice([1.0, 0.5]) * (size - sum(c.values())) + sum(c.values())
        for size, c in zip(carry, carries, strict=True)
    ]
    return Profile(
        tuple(block(i) for i in range(n)), (*carry, 0), num_microbatches, num_microbatches,
        recomputable_carries=(*carries, {}), outputs=("h",), gradient_bytes=(*(int(size) for size in back), 0),
    )  # fmt: skip


@dataclass(frozen=True)
class SlowStage:
    """One stage of a plan, counted block by block."""

    forward_s: float
    backward_s: float
    send_s: float
    return_s: float
    parameters: dict[str, int]  # those that train
    frozen: int
    buffer_bytes: int
    flight_bytes: int

    @property
    def time_s(self) -> float:
        return self.forward_s + self.backward_s + self.send_s + self.return_s

    @property
    def parameter_memory(self) -> int:
        """Four copies of what trains."""
        return 4 * sum(self.parameters.values()) + self.frozen


def slow_stages(profile: Profile, bounds: tuple[int, ...], recomputed: Collection[str], link: Link) -> list[SlowStage]:
    blocks = profile.blocks
    dropped = {name for b in blocks if b.name in recomputed for name in b.writes}

    def less(sizes: tuple[int, ...], cut: int) -> int:
        if cut in (0, len(blocks)):
            return 0
        by_name = profile.recomputable_carries[cut - 1]
        return sizes[cut - 1] - sum(size for name, size in by_name.items() if name in dropped)

    stages = []
    for first, last in itertools.pairwise(bounds):
        here = set(range(first, last))
        for j in reversed(range(first)):
            if blocks[j].name in recomputed and any(set(blocks[j].writes) & set(blocks[i].reads) for i in here):
                here.add(j)
        parameters = {}
        for i in here:
            own = blocks[i].parameter_bytes - blocks[i].frozen_bytes - sum(blocks[i].ties.values())
            parameters[f"own {i}"] = own
            parameters.update(blocks[i].ties)
        before, after = less(profile.carry_bytes, first), less(profile.carry_bytes, last)
        back, returned = less(profile.gradient_bytes, first), less(profile.gradient_bytes, last)
        stages.append(
            SlowStage(
                sum(blocks[i].forward_s for i in sorted(here)),
                sum(blocks[i].backward_s for i in sorted(here)),
                link.seconds(after),
                link.seconds(returned),
                parameters,
                sum(blocks[i].frozen_bytes for i in here),
                profile.num_microbatches * (before + back + returned),
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
