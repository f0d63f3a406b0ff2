"""The two cuts by hand, against values counted by eye and all cuts tried."""

from __future__ import annotations

import itertools
import random

import pytest

from pipeline import Profile
from pipeline.baselines import equal_blocks, equal_bounds, equal_parameters, parameter_bounds
from tests.pipeline.profiles import block_profile, random_profile


def test_equal_blocks_gives_the_first_stages_what_does_not_divide() -> None:
    assert equal_bounds(7, 3) == (0, 3, 5, 7)
    profile = random_profile(7, 4, random.Random(0))
    plan = equal_blocks(profile, num_stages=3, schedule="1f1b")
    assert [len(stage.blocks) for stage in plan.stages] == [3, 2, 2]
    assert plan.step_s > 0 and all(stage.memory_bytes > 0 for stage in plan.stages)
    with pytest.raises(ValueError, match="num_stages is 8; a program of 7 blocks"):
        equal_blocks(profile, num_stages=8, schedule="gpipe")


def test_equal_parameters_counts_a_tied_one_once_a_stage() -> None:
    sizes, shared = (100, 10, 10, 10, 100), {"t": 90}
    blocks = tuple(
        block_profile(f"b.{i}", parameter_bytes=size, ties=shared if i in (0, 4) else {})
        for i, size in enumerate(sizes)
    )
    profile = Profile(blocks, (0,) * 5, 2, 2)
    # 120 + 110 or 110 + 120: as good; apart from these, 130 and more.
    assert parameter_bounds(profile, 2) in ((0, 3, 5), (0, 2, 5))
    plan = equal_parameters(profile, num_stages=2, schedule="gpipe")
    assert len(plan.stages[0].blocks) in (2, 3)


def test_equal_parameters_has_the_smallest_largest_stage() -> None:
    rng = random.Random(1)
    for _ in range(50):
        n, num_stages = rng.randint(2, 8), rng.randint(1, 4)
        num_stages = min(n, num_stages)
        profile = random_profile(n, 2, rng)

        def most(bounds: tuple[int, ...], profile: Profile = profile) -> int:
            stages = []
            for a, b in itertools.pairwise(bounds):
                shared = {name: size for block in profile.blocks[a:b] for name, size in block.ties.items()}
                own = sum(block.parameter_bytes - sum(block.ties.values()) for block in profile.blocks[a:b])
                stages.append(own + sum(shared.values()))
            return max(stages)

        best = min(most((0, *cuts, n)) for cuts in itertools.combinations(range(1, n), num_stages - 1))
        assert most(parameter_bounds(profile, num_stages)) == best
