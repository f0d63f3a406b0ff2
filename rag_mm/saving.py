"""When a run's checkpoints are written: beside its steps, and without ending it when a disk is full."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from rag_mm import checkpoint
from rag_mm.config import CheckpointConfig
from rag_mm.disk_advice import advice
from rag_mm.mesh import Mesh
from rag_mm.saver import Saver

Contents = Callable[[], tuple[Mapping[str, Tensor], Mapping[str, Any]]]  # a rank's tensors, and the state


class LineWriter(Protocol):
    """A file that gets a line at each step, or at some."""

    path: Path

    def flush(self) -> None: ...

    def sync(self) -> None: ...


class Saving:
    """Every method is called by all ranks alike, between steps.

    Args:
        contents: what a checkpoint of the current step holds.
        say: prints a line, on the first rank.

    Attributes:
        line_files: of the first rank, whose lines belong to a checkpoint.
        waited_s: seconds that the steps have waited for checkpoints; whoever reports them sets it back to 0.
    """

    def __init__(
        self, run_dir: Path, mesh: Mesh, config: CheckpointConfig, *, contents: Contents, say: Callable[[str], None]
    ) -> None:
        self.run_dir, self.mesh, self.config = run_dir, mesh, config
        self.saver = Saver(run_dir, mesh, config, durable_first=self._make_lines_durable, say=say)
        self.waited_s = 0.0
        self.line_files: Sequence[LineWriter] = ()
        self._contents, self._say = contents, say

    def save(self, step: int, *, wait: bool, limit_s: float | None) -> None:
        """Begin to write a checkpoint; it appears once the run's lines are durable: on resume they must not lack steps.

        Args:
            wait: the checkpoint is there when this returns.
            limit_s: longest wait.

        Raises:
            OSError: with ``wait``, on every rank, if it is not there in that time.
        """
        started = time.perf_counter()
        problem = ""
        for file in self.line_files:
            try:
                file.flush()
            except OSError as error:
                problem = f"{file.path}: {error}"
        problem = self.mesh.broadcast(problem)
        if problem and wait:
            raise OSError(problem)
        if problem:
            self._say_unwritten(problem)
            return
        if wait:
            self.saver.write(step, *self._contents(), limit_s=limit_s)
        else:
            self.saver.begin(step, *self._contents())
        self.waited_s += time.perf_counter() - started

    def _make_lines_durable(self) -> None:
        for file in self.line_files:
            file.sync()

    def look_after(self) -> None:
        """Publish the checkpoint that is being written when it is done, and say what went wrong."""
        started = time.perf_counter()
        self.saver.poll()
        self.waited_s += time.perf_counter() - started
        if self.saver.problem:
            self._say_unwritten(self.saver.problem)
            self.saver.problem = None

    def _say_unwritten(self, problem: str) -> None:
        self._say(
            f"A CHECKPOINT COULD NOT BE WRITTEN ({problem}); training goes on, {checkpoint.last_of(self.run_dir)}; "
            f"before it is interrupted, {advice(problem, self.run_dir)}"
        )
