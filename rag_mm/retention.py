"""Which checkpoints of a run are kept: a pure decision.

A run that has diverged goes on writing checkpoints, and keeping "the newest two" would rotate the last useful
one away. So only *good* ones count: those whose steps since the one before had finite losses and were not all
skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Kept:
    """What retention knows of a checkpoint.

    Attributes:
        step: after how many steps.
        good: whether training was sound up to it.
        score: of the metric that ``checkpoint.best_by`` names, higher is better; None if it has none.
    """

    step: int
    good: bool
    score: float | None = None


def retained(checkpoints: Sequence[Kept], *, newest: int, every: int) -> set[int]:
    """Steps of the checkpoints to keep.

    Kept are the newest one, the ``newest`` newest good ones, good ones at multiples of ``every`` steps (0: none for
    that) and the good one with the highest score (the earliest of equals).
    """
    ordered = sorted(checkpoints, key=lambda c: c.step)
    good = [c for c in ordered if c.good]
    chosen = {c.step for c in ordered[-1:]} | {c.step for c in good[-newest:]}
    if every:
        chosen |= {c.step for c in good if c.step % every == 0}
    scored = [c for c in good if c.score is not None]
    if scored:
        chosen.add(max(scored, key=lambda c: (c.score, -c.step)).step)
    return chosen
