"""When the memory is embedded anew during training (``index.refresh``), and which index versions stay on disk.

The first version is made between two steps, by all ranks, when the reader joins, or at the start if negatives are
mined; what follows depends on the mode. A version is taken up before a step begins, never within one, so no batch is
searched in two of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rag_mm import checkpoint
from rag_mm.checkpoint import DamagedCheckpointError
from rag_mm.config import Config
from rag_mm.document_side import DocumentSide
from rag_mm.memory import Memory
from rag_mm.mesh import Mesh
from rag_mm.saver import Saver
from rag_mm.step import JointStep
from rag_mm.towers import Towers


class IndexUpkeep:
    """Keeps the memory's index up. Every method is called by all ranks alike.

    Args:
        saver: knows the checkpoint that is being written, which names a version too.
        say: prints a line, on the first rank.
    """

    def __init__(
        self,
        config: Config,
        *,
        memory: Memory,
        towers: Towers,
        joint: JointStep,
        mesh: Mesh,
        saver: Saver,
        say: Callable[[str], None],
    ) -> None:
        self.config, self.memory, self.towers, self.joint = config, memory, towers, joint
        self.mesh, self.saver, self._say = mesh, saver, say
        self._side = DocumentSide(towers) if config.index.refresh == "query_side" else None

    def before_step(self, step: int) -> None:
        """Refresh if it is due; called before the steps that search (`Streams.searches`)."""
        if self.memory.version is None:
            if self._side is not None:
                self._side.catch_up()
                self._side.stand_still()
            self._refresh(step)
        elif self.config.index.refresh == "every_n_steps" and self._is_due(step):
            self._refresh(step)

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        if self._side is not None:
            self._side.catch_up()
        return {"index_version": self.memory.version, "staleness": self.memory.staleness}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, whose weights are there already."""
        if state["index_version"] is not None:
            if self._side is not None:
                self._side.stand_still()
            self.memory.load(
                state["index_version"], staleness=state["staleness"], wait_s=self.config.checkpoint.visible_s,
                say=self._say,
            )  # fmt: skip

    def _is_due(self, step: int) -> bool:
        """Whether a refresh belongs before this step, and something has moved since the last one.

        That is every so many steps from the reader's first on, then, and when the retriever is frozen for good.
        """
        train, version = self.config.train, self.memory.version
        every, since = self.config.index.refresh_every_n_steps, step - train.retriever_steps
        due = (every > 0 and since % every == 0) or step in (train.retriever_steps, train.retriever_moves[1])
        return due and version is not None and self.joint.streams.moved_retriever(version, step)

    def _refresh(self, step: int) -> None:
        named = self._named_versions() if self.mesh.is_first else set()
        probe = self.joint.probe(step)
        k, say = self.config.retriever.k, self._say
        self.memory.refresh(self.towers, step=step, probe_BE=probe, k=k, named=named, say=say)

    def _named_versions(self) -> set[int]:
        """Index versions that checkpoints name, the one being written as well."""
        run_dir = Path(self.config.run_dir)
        states = [self.saver.pending_state or {"index_version": None}]
        for step in checkpoint.list_steps(run_dir):
            with contextlib.suppress(DamagedCheckpointError):
                states.append(checkpoint.read_state(run_dir, step))
        return {state["index_version"] for state in states} - {None}
