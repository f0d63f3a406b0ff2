"""The two ways of cutting that people use by hand, as plans to compare with: equal blocks, equal parameters."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from pipeline.costs import Bounds, Costs, Link
from pipeline.cut_search import search
from pipeline.plan_file import Plan
from pipeline.simulate import predicted
from pipeline.trace import Profile


def equal_bounds(num_blocks: int, num_stages: int) -> Bounds:
    """As many blocks on each stage; the first stages have one more where that does not divide."""
    size, more = divmod(num_blocks, num_stages)
    return tuple(s * size + min(s, more) for s in range(num_stages + 1))


def parameter_bounds(profile: Profile, num_stages: int) -> Bounds:
    """The smallest largest number of parameters on a stage, then the smallest sum of squares."""
    costs = Costs(profile)
    parameters = costs.parameter_bytes.astype(float)
    order = np.arange(costs.num_blocks + 1)
    valid = order[:, None] < order[None, :]
    most, _ = search(parameters, [valid] * num_stages, minimax=True)
    return search(parameters**2, [valid & (parameters <= most)] * num_stages, minimax=False)[1]


def equal_blocks(
    profile: Profile,
    *,
    num_stages: int,
    schedule: str,
    num_ranks: int | None = None,
    link: Link | None = None,
    parameter_copies: float = 4.0,
) -> Plan:
    """The plan with equally many blocks on every stage, nothing recomputed."""
    return _plan(profile, equal_bounds(len(profile.blocks), num_stages), schedule, num_ranks, link, parameter_copies)


def equal_parameters(
    profile: Profile,
    *,
    num_stages: int,
    schedule: str,
    num_ranks: int | None = None,
    link: Link | None = None,
    parameter_copies: float = 4.0,
) -> Plan:
    """The plan with the most equal parameters on every stage, nothing recomputed."""
    return _plan(profile, parameter_bounds(profile, num_stages), schedule, num_ranks, link, parameter_copies)


def _plan(
    profile: Profile, bounds: Bounds, schedule: str, num_ranks: int | None, link: Link | None, parameter_copies: float
) -> Plan:
    if not all(a < b for a, b in pairwise(bounds)) or len(bounds) < 2:
        raise ValueError(
            f"num_stages is {len(bounds) - 1}; a program of {len(profile.blocks)} blocks can have 1 to "
            f"{len(profile.blocks)}"
        )
    return predicted(
        profile,
        bounds,
        schedule=schedule,
        num_ranks=len(bounds) - 1 if num_ranks is None else num_ranks,
        link=link,
        parameter_copies=parameter_copies,
    )
