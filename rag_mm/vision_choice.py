"""Three ways to encode the pictures that several samples read, and which is predicted to be fastest.

``repeated``: for every pair, in the pipeline. ``grouped``: for every different document of a micro-batch, in the
pipeline (`VisionGrouped`). ``once``: for every different document of a step, outside of it, at the price of a second
forward (`VisionOnce`). All three give the same gradients. How often a document is read decides, and how many
micro-batches and ranks there are. A way that no cut fits into the ranks' memory is not taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from pipeline import BlockProgram, Plan, Profile
from pipeline.partition import CapacityError
from rag_mm.mesh import Mesh
from rag_mm.vision_grouped import GATHER, VisionGrouped
from rag_mm.vision_once import BLOCK, VisionOnce

Vision = VisionOnce | VisionGrouped
MODES = ("repeated", "grouped", "once")


def make_vision(mode: str, reader: BlockProgram, mesh: Mesh, *, num_microbatches: int) -> Vision | None:
    """The reader with its pictures encoded in one of `MODES`; None: as it is (repeated)."""
    assert mode in MODES
    if mode == "repeated":
        return None
    return VisionOnce(reader, mesh) if mode == "once" else VisionGrouped(reader, num_microbatches=num_microbatches)


def mode_of(plan: Plan) -> str:
    """Which of `MODES` a plan is for."""
    blocks = {name for stage in plan.stages for name in stage.blocks}
    if BLOCK not in blocks:
        return "once"
    return "grouped" if GATHER in blocks else "repeated"


def choose(
    profiles: Mapping[str, Profile],
    *,
    partition: Callable[[str, Profile], Plan],
    sharing: float,
    k: int,
    num_replicas: int,
    num_ranks: int,
) -> tuple[str, dict[str, float]]:
    """The mode that is predicted to be fastest (of equals the first in `MODES`), and each one's seconds a step
    (infinite where no cut fits).

    Args:
        profiles: of each of `MODES`, for one replica; ``once`` is the reader without the vision block.
        partition: makes the plan of a mode and its profile.
        sharing: pairs for each different document of the global batch, at least 1. A question's own picture is nobody
            else's.
        k: pairs of a question.
        num_ranks: over which the pictures of all ``num_replicas`` replicas are dealt out, if encoded once.

    Raises:
        CapacityError: if no cut fits for any mode; that of the mode that needs least.
    """
    vision = profiles["repeated"].blocks[0]
    num_microbatches = profiles["repeated"].num_microbatches
    assert vision.name == BLOCK and {p.num_microbatches for p in profiles.values()} == {num_microbatches}
    seconds: dict[str, float] = {}
    refused = []
    for mode in MODES:
        try:
            seconds[mode] = partition(mode, profiles[mode]).step_s
        except CapacityError as error:
            seconds[mode] = math.inf
            refused.append(error)
    if len(refused) == len(MODES):
        raise min(refused, key=lambda error: error.smallest)
    twice = vision.forward_s * 2 + vision.backward_s
    different = (1 + k / sharing) / (1 + k)  # of the pictures that a micro-batch encodes if repeated
    seconds["once"] += num_microbatches * num_replicas * twice * different / num_ranks
    return min(MODES, key=seconds.__getitem__), seconds
