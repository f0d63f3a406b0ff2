"""Which way to encode pictures is predicted to be fastest, on profiles made by hand; and what a plan is for."""

from __future__ import annotations

import pytest

from pipeline import Plan, Profile, partition
from pipeline.partition import CapacityError
from pipeline.profile import BlockProfile
from rag_mm.mesh import Mesh
from rag_mm.vision_choice import MODES, choose, make_vision, mode_of
from rag_mm.vision_grouped import VisionGrouped
from rag_mm.vision_once import VisionOnce
from tests.rag_mm.reader_batch import reader

MICROBATCHES = 4


def profile(**seconds: float) -> Profile:
    """Blocks whose backward takes twice their forward."""
    blocks = tuple(BlockProfile(name, s, 2 * s, 0, 8, 8, 8, "sample", False, "", {}) for name, s in seconds.items())
    return Profile(blocks, (0,) * len(blocks), MICROBATCHES, 8)


def predicted(
    sharing: float, *, k: int = 3, replicas: int = 1, ranks: int = 1, grouped_s: float = 9.0, gather_s: float = 0.0
) -> tuple[str, dict[str, float]]:
    """Vision 1 s, encoder and decoder 1 s each; ``grouped_s`` for the vision block on the pictures of a micro-batch."""
    profiles = {
        "repeated": profile(vision=1.0, encoder=1.0, decoder=1.0),
        "grouped": profile(vision=grouped_s, gather=gather_s, encoder=1.0, decoder=1.0),
        "once": profile(encoder=1.0, decoder=1.0),
    }
    return choose(
        profiles, sharing=sharing, k=k, num_replicas=replicas, num_ranks=ranks,
        partition=lambda _, p: partition(p, num_stages=1, schedule="gpipe", num_microbatches=MICROBATCHES),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sharing", "grouped_s", "chosen"),
    [
        (1.0, 1.0, "repeated"),  # nothing shared: grouped is no faster, and once a second forward for nothing
        (1.4, 9.0, "repeated"),  # once: 4 x 4 x (1 + 3 / 1.4) / 4 = 12.6 instead of 4 x 3 = 12 s
        (1.6, 9.0, "once"),  # 11.5
        (1.6, 0.95, "grouped"),  # 4 x 3 x 0.95 = 11.4
        (1.6, 0.97, "once"),
        (8.0, 0.5, "once"),  # 5.5 and 6
        (8.0, 0.4, "grouped"),  # documents are shared within micro-batches only
    ],
)
def test_the_fastest_is_chosen(sharing: float, grouped_s: float, chosen: str) -> None:
    found, seconds = predicted(sharing, grouped_s=grouped_s)
    assert found == chosen
    assert seconds["repeated"] == pytest.approx(4 * 3 * 3.0)
    assert seconds["grouped"] == pytest.approx(4 * 3 * (2.0 + grouped_s))
    assert seconds["once"] == pytest.approx(4 * 3 * 2.0 + 4 * 4 * (1 + 3 / sharing) / 4)
    assert seconds[found] == min(seconds.values())


def test_the_gather_counts() -> None:
    assert predicted(1.0, grouped_s=0.9)[0] == "grouped"
    assert predicted(1.0, grouped_s=0.9, gather_s=0.2)[0] == "repeated"


def test_replicas_bring_as_many_pictures_as_ranks() -> None:
    """Two replicas on two ranks: each rank encodes what one replica on one rank does."""
    assert predicted(1.0, replicas=2, ranks=2) == predicted(1.0)
    assert predicted(1.0, ranks=2)[1]["once"] < predicted(1.0)[1]["once"]  # two ranks of one pipeline share them


def test_what_does_not_fit_is_not_chosen() -> None:
    """Repeated is fastest; where it does not fit, the fastest of the others is taken; the error is of the smallest."""

    def choose_within(**needed: int) -> tuple[str, dict[str, float]]:
        def within(mode: str, p: Profile) -> Plan:
            if needed[mode] > 10:
                raise CapacityError(mode, smallest=needed[mode])
            return partition(p, num_stages=1, schedule="gpipe", num_microbatches=MICROBATCHES)

        profiles = {
            "repeated": profile(vision=1.0, encoder=1.0),
            "grouped": profile(vision=1.5, gather=0.0, encoder=1.0),
            "once": profile(encoder=1.0),
        }
        return choose(profiles, sharing=1.0, k=3, num_replicas=1, num_ranks=1, partition=within)

    assert choose_within(repeated=10, grouped=10, once=10)[0] == "repeated"
    found, seconds = choose_within(repeated=11, grouped=11, once=10)
    assert found == "once" and seconds["repeated"] == seconds["grouped"] == float("inf")
    with pytest.raises(CapacityError, match="grouped"):
        choose_within(repeated=13, grouped=11, once=12)


@pytest.mark.parametrize("mode", MODES)
def test_a_plan_says_what_it_is_for(mode: str) -> None:
    whole = reader("fid")
    vision = make_vision(mode, whole, Mesh(num_stages=1, num_replicas=1), num_microbatches=2)
    assert type(vision) is {"repeated": type(None), "grouped": VisionGrouped, "once": VisionOnce}[mode]
    program = whole if vision is None else vision.program
    assert mode_of(Plan.from_cuts(program, [2], num_microbatches=2)) == mode
    names = set(program.named_parameters_global()) | set({} if vision is None else vision.parameters)
    assert names == set(whole.named_parameters_global())  # checkpoints fit all three
