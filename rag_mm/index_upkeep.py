"""When the memory is embedded anew during training (``index.refresh``), and which index versions stay on disk.

The first version is made between two steps, by all ranks, when the reader joins, or at the start if negatives are
mined; what follows depends on the mode. A version is taken up before a step begins, never within one, so no batch is
searched in two of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rag_mm import checkpoint
from rag_mm.background_refresh import BackgroundRefresh, Pending
from rag_mm.checkpoint import DamagedCheckpointError
from rag_mm.config import Config
from rag_mm.document_side import DocumentSide
from rag_mm.memory import Memory
from rag_mm.mesh import Mesh
from rag_mm.saver import Saver
from rag_mm.step import JointStep
from rag_mm.towers import Towers, embed_all
from retriever.approximate import question_features
from retriever.features import Featurizer
from retriever.sizing import kind_of


class IndexUpkeep:
    """Keeps the memory's index up. Every method is called by all ranks alike.

    Args:
        saver: knows the checkpoint that is being written, which names a version too.
        say: prints a line, on the first rank.

    Attributes:
        waited_s: seconds that steps have waited for a refresh; whoever reports them sets it back to 0.
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
        self._background: BackgroundRefresh | None = None
        if config.index.refresh == "async":
            self._background = BackgroundRefresh(
                Path(config.run_dir), towers, mesh, num_edits=memory.store.num_edits, say=say
            )
        self.waited_s = 0.0
        self._unmoved = 0  # before this step, documents were still embedded as in the index's own version

    def wait(self, step: int, asked: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the refresh that this step adopts, if there is one and it is late.

        Args:
            asked: whether this rank was asked to stop.

        Returns:
            False if a rank was asked to stop while the refresh was not done yet.

        Raises:
            RefreshError: on every rank, if the refresh failed.
        """
        if self._background is None or not self._adopts(step):
            return True
        started = time.perf_counter()
        ready = self._background.poll()
        while not ready and not any(self.mesh.gather(asked())):
            ready = self._background.poll(wait=True)
        self.waited_s += time.perf_counter() - started
        return ready

    def before_step(self, step: int) -> None:
        """Make the first version, adopt a refresh, or begin the next one, if this step is the one for it.

        Called before the steps that search (`Streams.searches`).
        """
        mode = self.config.index.refresh
        if self.memory.version is None:
            if self._side is not None:
                self._side.catch_up()
                self._side.stand_still()
            self._refresh(step)
        elif mode == "every_n_steps" and self._is_due(step) and not self._is_same(step):
            self._refresh(step)
        elif self._background is not None:
            if self._adopts(step) and self.wait(step):
                self._adopt(self._background, step)
            idle = self._background.pending is None
            if idle and self._is_owed(step) and self._is_worth(step) and not self._is_same(step):
                self._background.begin(step)
                self._background.prune(self._named("refresh"))

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        if self._side is not None:
            self._side.catch_up()
        pending = None if self._background is None else self._background.pending
        return {
            "index_version": self.memory.version,
            "staleness": self.memory.staleness,
            "refresh": None if pending is None else {"step": pending.step, "weights": pending.weights},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, whose weights are there already; a refresh that was under way begins again."""
        wait_s = self.config.checkpoint.visible_s
        if state["index_version"] is not None:
            if self._side is not None:
                self._side.stand_still()
            self.memory.load(state["index_version"], staleness=state["staleness"], say=self._say)
        if self._background is not None and state.get("refresh") is not None:
            self._background.resume(Pending(**state["refresh"]), wait_s=wait_s)

    def close(self) -> None:
        """End what runs beside the steps."""
        if self._background is not None:
            self._background.close()

    def _is_due(self, step: int) -> bool:
        """Whether a refresh belongs before this step, and something has moved since the last one.

        That is every so many steps from the reader's first on, then, and when the retriever is frozen for good.
        """
        train, version = self.config.train, self.memory.version
        every, since = self.config.index.refresh_every_n_steps, step - train.retriever_steps
        due = (every > 0 and since % every == 0) or step in (train.retriever_steps, train.retriever_moves[1])
        return due and version is not None and self._has_moved(version, step)

    def _is_owed(self, step: int) -> bool:
        """The same for refreshes that take a while: one may be under way when the retriever is frozen for good."""
        version, frozen = self.memory.version, step >= self.config.train.retriever_moves[1]
        late = frozen and version is not None and self._has_moved(version, step)
        return late or self._is_due(step)

    def _has_moved(self, version: int, step: int) -> bool:
        """Whether documents may be embedded otherwise than in a version, as far as phases tell."""
        return self.joint.streams.moved_retriever(max(version, self._unmoved), step)

    def _is_same(self, step: int) -> bool:
        """Whether a refresh would give the same vectors again: what embeds documents is frozen (`retriever.freeze`).

        The weights tell, so a resumed run, which does not know what was compared before, leaves out the same ones.
        """
        same = self.memory.holds(self.towers)
        if same:
            self._unmoved = step
        return same

    def _is_worth(self, step: int) -> bool:
        """Whether a refresh that begins now is searched before training ends."""
        index = self.config.index
        return step + (index.refresh_lag if index.adopt == "exact" else 1) < self.config.train.steps

    def _adopts(self, step: int) -> bool:
        """Whether a refresh is under way that this step has to search, or may."""
        assert self._background is not None
        pending = self._background.pending
        if pending is None:
            return False
        if self.config.index.adopt == "exact":
            return step >= pending.step + self.config.index.refresh_lag
        return self._background.poll()

    def _adopt(self, background: BackgroundRefresh, step: int) -> None:
        assert background.pending is not None
        self.memory.adopt(
            background.pending.step, probe_BE=self.joint.probe(step), k=self.config.retriever.k,
            named=self._named("index_version"),
        )  # fmt: skip
        background.end()
        background.prune(self._named("refresh"))

    def _refresh(self, step: int) -> None:
        named, probe = self._named("index_version"), self.joint.probe(step)
        k, say = self.config.retriever.k, self._say
        self.memory.refresh(
            self.towers, step=step, probe_BE=probe, k=k, named=named, tuning_QE=self.tuning(), say=say
        )  # fmt: skip

    def tuning(self) -> Tensor | None:
        """Training questions, embedded, that an index which is not exact is tuned with; None if there are too few."""
        config, factory = self.config, self.config.index.train_factory
        if factory == "Flat" or kind_of(factory, len(self.memory.store), self.towers.encoder.dim) == "Flat":
            return None
        encoder = self.towers.encoder
        own = Featurizer(encoder.config)  # the encoder's counts what is cut off of documents
        parts = [
            embed_all(self.towers, dict(features))
            for features in question_features(
                own, self.joint.dataset, count=config.index.recall_queries, image_size=config.data.image_size,
                image_transform=encoder.image_transform, batch_size=config.index.batch_size,
            )
        ]  # fmt: skip
        return torch.cat(parts) if parts else None

    def _named(self, what: Literal["index_version", "refresh"]) -> set[int]:
        """Steps of the index versions or of the snapshots that checkpoints name, the one being written as well.

        Only the first rank looks, which is the one that deletes.
        """
        if not self.mesh.is_first:
            return set()
        run_dir = Path(self.config.run_dir)
        states: list[Mapping[str, Any]] = [self.saver.pending_state or {}]
        for step in checkpoint.list_steps(run_dir):
            with contextlib.suppress(DamagedCheckpointError):
                states.append(checkpoint.read_state(run_dir, step))
        if what == "index_version":
            return {state["index_version"] for state in states if state.get("index_version") is not None}
        return {state["refresh"]["step"] for state in states if state.get("refresh") is not None}
