"""Which stages compute a block again, as the program runs it; and the greedy choice for many such blocks."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from pipeline import Block, BlockProgram, Plan, trace
from pipeline.costs import Costs
from pipeline.recomputation import EXHAUSTIVE, choose, producers
from tests.pipeline.profiles import random_profile, recomputed_sets


class Add(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, *parts: Tensor) -> Tensor:
        return sum(parts, start=self.weight * 0.5)


def table_program() -> BlockProgram:
    """Two recomputable blocks, the second reading the first; read by blocks 2 and 5, 3 and the output."""
    blocks = [
        Block("angles", Add(), ("positions",), ("angles",), recomputable=True),
        Block("rotary", Add(), ("angles",), ("rotary",), recomputable=True),
        Block("body.0", Add(), ("x", "angles"), ("x",)),
        Block("body.1", Add(), ("x", "rotary"), ("x",)),
        Block("body.2", Add(), ("x",), ("x",)),
        Block("body.3", Add(), ("x", "angles"), ("losses",)),
    ]
    return BlockProgram(blocks, inputs=("x", "positions"), outputs=("losses", "rotary"))


def test_costs_say_what_the_program_does() -> None:
    program = table_program()
    batch = {"x": torch.randn(4, 3), "positions": torch.randn(4, 3)}
    profile = trace(program, batch, num_microbatches=2, repeats=1, lineage=False)
    n, row = len(program.blocks), 2 * 3 * 4  # two samples of three floats
    assert profile.carry_bytes == (row, 2 * row, 3 * row, 3 * row, 3 * row, 0)
    for recomputed in ((), ("angles",), ("angles", "rotary")):
        costs = Costs(profile, recomputed=recomputed)
        for cut in range(1, n):
            assert costs.carry_bytes[cut - 1] == row * len(program.carry(cut, recomputed=recomputed))
        for first in range(n):
            for last in range(first + 1, n + 1):
                again = [block.name for block in program.rerun(first, last, recomputed=recomputed)]
                assert [profile.blocks[j].name for j in costs.again(first, last)] == again
                held = {*again, *(block.name for block in program.blocks[first:last])}
                cost = costs.stage(first, last)
                assert costs.parameter_memory([(first, last)]) == 4 * len(held) * 3 * 4
                assert cost.forward_s == pytest.approx(
                    sum(b.forward_s for b in profile.blocks if b.name in held), rel=1e-9
                )
                for table, value in ((costs.forward_s, cost.forward_s), (costs.static_bytes, cost.static_bytes)):
                    assert table[first, last] == pytest.approx(value, rel=1e-9)
                assert costs.flight_bytes[first, last] == cost.flight_bytes


def test_mistakes() -> None:
    profile = trace(
        table_program(), {"x": torch.randn(4, 3), "positions": torch.randn(4, 3)},
        num_microbatches=2, repeats=1, lineage=False,
    )  # fmt: skip
    for names, message in (
        (("angels",), "unknown block 'angels' .did you mean 'angles'"),
        (("body.1",), "'body.1', which is not recomputable"),
        (("rotary",), "recomputed has 'rotary', but not 'angles'"),
    ):
        with pytest.raises(ValueError, match=message):
            Costs(profile, recomputed=names)
        with pytest.raises(ValueError, match=message):
            Plan.from_cuts(table_program(), [2], schedule="gpipe", recomputed=names).validate(table_program())


def test_many_are_chosen_greedily() -> None:
    """A separable score, whose best set greedy steps must reach, and sets that keep what members read."""
    rng = random.Random(7)
    for _ in range(20):
        profile = random_profile(12, 2, rng, num_recomputable=EXHAUSTIVE + 2)
        needs, seen = producers(profile), []
        worth = {b.name: rng.choice([-1.0, 1.0]) for b in profile.blocks}

        def evaluate(some: tuple[str, ...]) -> tuple[tuple[float, ...], tuple[str, ...]]:
            seen.append(some)  # noqa: B023
            return (sum(worth[name] for name in some),), some  # noqa: B023

        best = choose(profile, evaluate)
        allowed = set(recomputed_sets(profile))
        assert set(seen) <= allowed and len(seen) == len(set(seen))
        assert () in seen and tuple(profile.blocks[i].name for i in sorted(needs)) in seen
        if not any(needs.values()):
            assert set(best) == {profile.blocks[i].name for i in needs if worth[profile.blocks[i].name] < 0}
