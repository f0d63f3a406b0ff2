"""Steps that must not be taken: a loss or gradient that is not finite, and spikes.

A spike is a loss or gradient norm more than k standard deviations above the mean of the last steps that were
taken (as OLMo's optimisers skip steps); it is judged once that many were taken, and anew when the objectives
change, since a new objective raises the loss by itself. Loss and norm are sums over all ranks, so every rank
judges alike. What was not taken is written down with its samples, for somebody to look at.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rag_mm.line_file import LineFile

FILE = "bad_steps.jsonl"


class BadSteps:
    """Judges the steps of a run, in order.

    Args:
        sigma: standard deviations above the mean that make a spike; 0: only what is not finite is bad.
        window: taken steps that mean and deviation are of.

    Attributes:
        total: bad steps of the run.
        in_a_row: bad steps since the last good one.
    """

    def __init__(self, *, sigma: float, window: int) -> None:
        self.sigma, self.window = sigma, window
        self.total = self.in_a_row = 0
        self._objectives: list[str] = []
        self._taken: deque[tuple[float, float]] = deque(maxlen=window)

    def judge(self, losses: Mapping[str, float], norm: float) -> str | None:
        """Why a step must not be taken, or None; counts it either way.

        Args:
            losses: by objective, summed over all ranks.
            norm: of the gradient, before clipping.
        """
        if sorted(losses) != self._objectives:
            self._objectives = sorted(losses)
            self._taken.clear()
        loss = sum(losses.values())
        reason = self._why(loss, norm)
        if reason is None:
            self._taken.append((loss, norm))
            self.in_a_row = 0
        else:
            self.total += 1
            self.in_a_row += 1
        return reason

    def _why(self, loss: float, norm: float) -> str | None:
        for what, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                return f"{what} is not finite"
        if not self.sigma or len(self._taken) < self.window:
            return None
        losses, norms = zip(*self._taken, strict=True)
        for what, value, before in (("loss", loss, losses), ("gradient norm", norm, norms)):
            limit = statistics.fmean(before) + self.sigma * statistics.pstdev(before)
            if value > limit:
                return f"{what} {value:.4g} is above {limit:.4g}"
        return None

    def state(self) -> dict[str, Any]:
        """For a checkpoint; JSON keeps its numbers exactly."""
        return {
            "total": self.total,
            "in_a_row": self.in_a_row,
            "objectives": self._objectives,
            "taken": [list(pair) for pair in self._taken],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; a shorter window keeps the newest steps."""
        self.total, self.in_a_row = state["total"], state["in_a_row"]
        self._objectives = list(state["objectives"])
        self._taken = deque(((loss, norm) for loss, norm in state["taken"]), maxlen=self.window)


class BadStepsFile:
    """``bad_steps.jsonl`` of a run: one line for each step that was not taken, there from the first one on.

    A line that cannot be written waits for the next time, as those of the metrics do.
    """

    def __init__(self, run_dir: Path, *, start_step: int) -> None:
        """Cut the file back to ``start_step``, as a resumed run does with its metrics.

        Raises:
            ValueError: if the file is damaged; names it.
            OSError: if it cannot be written; it is then as it was.
        """
        self.path = run_dir / FILE
        there = self.path.exists()
        kept = [line for line in _whole_lines(self.path) if _step(line, self.path) <= start_step] if there else []
        self._file = LineFile(self.path, "".join(kept) if there else None)

    def write(self, *, step: int, reason: str, loss: float, norm: float, sample_ids: Sequence[str]) -> None:
        """Note one step."""
        line = {
            "step": step,
            "reason": reason,
            "loss": loss if math.isfinite(loss) else None,
            "grad_norm": norm if math.isfinite(norm) else None,
            "sample_ids": list(sample_ids),
        }
        self._file.append(json.dumps(line))

    def flush(self) -> None:
        """Write the lines that wait.

        Raises:
            OSError: if that is not possible.
        """
        self._file.flush()

    def sync(self) -> None:
        """Make what is written durable; may run beside the steps.

        Raises:
            OSError: if that is not possible.
        """
        self._file.sync()

    def close(self) -> None:
        """Make all lines durable (else an OSError) and close the file."""
        self._file.close()


def _whole_lines(path: Path) -> list[str]:
    """Lines that end; the last one may have been cut off by a crash."""
    return [line for line in path.read_text(errors="replace").splitlines(keepends=True) if line.endswith("\n")]


def _step(line: str, path: Path) -> int:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        step = None
    if not isinstance(step, int):
        raise ValueError(f"{path} is damaged: {line.strip()[:80]!r} is not a line of it; restore or remove the file")
    return step
