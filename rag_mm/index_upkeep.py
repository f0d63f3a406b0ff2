"""When the memory is embedded anew during training, and which index versions must stay on disk."""

from __future__ import annotations

import contextlib
from pathlib import Path

from rag_mm import checkpoint
from rag_mm.checkpoint import DamagedCheckpointError
from rag_mm.config import Config
from rag_mm.memory import Memory
from rag_mm.mesh import Mesh
from rag_mm.saver import Saver
from rag_mm.step import JointStep
from rag_mm.towers import Towers


class IndexUpkeep:
    """Refreshes the memory's index, before the steps that search it.

    Args:
        saver: knows the checkpoint that is being written, which names a version too.
    """

    def __init__(
        self, config: Config, *, memory: Memory, towers: Towers, joint: JointStep, mesh: Mesh, saver: Saver
    ) -> None:
        self.config, self.memory, self.towers, self.joint = config, memory, towers, joint
        self.mesh, self.saver = mesh, saver

    def before_step(self, step: int) -> None:
        """Refresh if it is due."""
        every, since = self.config.index.refresh_every_n_steps, step - self.config.train.retriever_steps
        due = self.memory.version is None or (every > 0 and since % every == 0)
        if not due or self.memory.version == step:
            return
        if self.memory.version is not None and not self.joint.trains_retriever(step):
            return  # nothing has moved since
        named = self.named_versions() if self.mesh.is_first else set()
        probe = self.joint.probe(step)
        self.memory.refresh(self.towers, step=step, probe_BE=probe, k=self.config.retriever.k, named=named)

    def named_versions(self) -> set[int]:
        """Index versions that checkpoints name, the one being written as well."""
        run_dir = Path(self.config.run_dir)
        states = [self.saver.pending_state or {"index_version": None}]
        for step in checkpoint.list_steps(run_dir):
            with contextlib.suppress(DamagedCheckpointError):
                states.append(checkpoint.read_state(run_dir, step))
        return {state["index_version"] for state in states} - {None}
