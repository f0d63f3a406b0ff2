"""When a run's checkpoints are written: beside its steps, and without ending it when a disk is full."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rag_mm import checkpoint
from rag_mm.config import CheckpointConfig
from rag_mm.mesh import Mesh
from rag_mm.metrics import MetricsWriter

Contents = Callable[[], tuple[Mapping[str, Tensor], Mapping[str, Any]]]  # a rank's tensors, and the state


class Saving:
    """Every method is called by all ranks alike, between steps.

    Args:
        contents: what a checkpoint of the current step holds.
        say: prints a line, on the first rank.

    Attributes:
        waited_s: seconds that the steps have waited for checkpoints; whoever reports them sets it back to 0.
    """

    def __init__(
        self, run_dir: Path, mesh: Mesh, config: CheckpointConfig, *, contents: Contents, say: Callable[[str], None]
    ) -> None:
        self.run_dir, self.mesh, self.config = run_dir, mesh, config
        self.saver = checkpoint.Saver(run_dir, mesh, config)
        self.waited_s = 0.0
        self._contents, self._say = contents, say

    def save(self, step: int, writer: MetricsWriter | None, *, wait: bool = True, limit_s: float | None = None) -> None:
        """Begin to write a checkpoint once ``metrics.jsonl`` is durable: on resume it must not lack steps.

        Args:
            writer: of the metrics, on the first rank.
            wait: the checkpoint is there when this returns.
            limit_s: longest wait.

        Raises:
            OSError: with ``wait``, on every rank, if one of the two could not be written in that time.
        """
        problem = ""
        if writer is not None:
            try:
                writer.sync()
            except OSError as error:
                problem = f"{writer.path}: {error}"
        problem = self.mesh.broadcast(problem)
        if problem and wait:
            raise OSError(problem)
        if problem:
            self._say_unwritten(problem)
            return
        started = time.perf_counter()
        self.saver.begin(step, *self._contents())
        if wait:
            self.saver.finish(limit_s=limit_s)
            if self.saver.problem:
                raise OSError(self.saver.problem)
        self.waited_s = time.perf_counter() - started

    def look_after(self) -> None:
        """Publish the checkpoint that is being written when it is done, and say what went wrong."""
        self.saver.poll()
        if self.saver.problem:
            self._say_unwritten(self.saver.problem)
            self.saver.problem = None

    def _say_unwritten(self, problem: str) -> None:
        steps = checkpoint.list_steps(self.run_dir)
        last = f"the last one is of step {steps[-1]}" if steps else "there is none yet"
        self._say(
            f"A CHECKPOINT COULD NOT BE WRITTEN ({problem}); training goes on, {last}: make room "
            f"at {self.run_dir} before it is interrupted"
        )
