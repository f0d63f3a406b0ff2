"""Writing checkpoints beside the steps of training.

Training waits only for a copy of the tensors. A thread of each rank writes its part, the first rank's then seals the
folder, gives it its name and removes old ones; steps go on meanwhile, however slow the disk is, and only the next
checkpoint waits for the one before. Ranks tell each other between steps how far they are (one small collective while
a checkpoint is on its way), so all of them find at the same step that it is there, or that it failed. The price is
the memory of one copy, and one checkpoint on its way at a time.

Nothing of a failed one is used again: after an ``fsync`` that failed, only writing everything anew says anything.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from rag_mm.checkpoint import checkpoint_dir, list_steps, read_state
from rag_mm.config import CheckpointConfig
from rag_mm.disk_advice import STILL_WRITING
from rag_mm.mesh import Mesh
from rag_mm.retention import Kept, retained
from retriever import checkpoint_files as files
from retriever.checkpoint_files import DamagedCheckpointError
from retriever.durable_files import put_folder, remove_folder

BEAT_S = 0.5  # between two exchanges of ranks that wait: far below the timeout of their connections
ATTEMPTS = 2  # at a checkpoint that must be there before the run ends


@dataclass
class _Pending:
    step: int
    state: dict[str, Any]
    work: Future[Any]  # of this rank: its part, then, on the first, the rest
    sealing: bool = False


class Saver:
    """Writes the checkpoints of a run.

    Every method is called by all ranks alike, between steps.

    Args:
        config: how many are kept, and which.
        timeout_s: longest wait of a rank for the others' files.
        durable_first: what must be durable before a checkpoint appears (of the first rank); runs on the thread.
        say: told what is worth knowing though the checkpoint is there.

    Attributes:
        pending_state: of the checkpoint that is being written, if there is one.
        problem: why the last one could not be written, or None.
    """

    def __init__(
        self,
        run_dir: str | Path,
        mesh: Mesh,
        config: CheckpointConfig,
        *,
        timeout_s: float = 1800.0,
        durable_first: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.run_dir, self.mesh, self.config = Path(run_dir), mesh, config
        self.problem: str | None = None
        self.durable_first, self._say = durable_first, say
        # Collectives of the writing thread must not meet those of the steps: a group of its own.
        self._group = dist.new_group(timeout=timedelta(seconds=timeout_s), backend="gloo") if mesh.size > 1 else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._copies: dict[str, Tensor] = {}
        self._pending: _Pending | None = None

    @property
    def pending_state(self) -> Mapping[str, Any] | None:
        return None if self._pending is None else self._pending.state

    def begin(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Copy the tensors that this rank holds and begin to write; waits until the checkpoint before is done."""
        self.finish()
        copies = {name: self._copied(name, tensor) for name, tensor in tensors.items()}
        finite = all(bool(t.isfinite().all()) for t in copies.values() if t.is_floating_point())
        sound = all(self.mesh.gather(finite))
        whole = {"step": step, **state, "good": bool(state.get("good", True)) and sound}
        self._pending = _Pending(step, whole, self._thread.submit(self._write, self._temporary(step), copies))

    def poll(self) -> bool:
        """Look how far the ranks are; gives whether a checkpoint is still on its way."""
        if self._pending is not None:
            self._exchange(self._pending, late=None)
        return self._pending is not None

    def finish(self, *, limit_s: float | None = None) -> None:
        """Wait until the checkpoint that is being written is there, at most ``limit_s`` seconds."""
        end = None if limit_s is None else time.monotonic() + limit_s
        while self._pending is not None:
            left = math.inf if end is None else end - time.monotonic()
            wait([self._pending.work], timeout=max(0.0, min(BEAT_S, left)))
            over = end is not None and time.monotonic() >= end
            self._exchange(self._pending, late=limit_s if over else None)

    def write(
        self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, limit_s: float | None = None
    ) -> None:
        """Write a checkpoint and wait for it; one that fails is written once more.

        Args:
            limit_s: longest wait, also for the one before.

        Raises:
            OSError: on every rank, if it is not there in that time.
        """
        end = None if limit_s is None else time.monotonic() + limit_s

        def left() -> float | None:
            return None if end is None else max(0.0, end - time.monotonic())

        self.finish(limit_s=left())
        for attempt in range(ATTEMPTS):
            if self.problem is not None and any(self.mesh.gather(left() == 0.0)):
                break
            if attempt:
                self._say(f"THE CHECKPOINT OF STEP {step} COULD NOT BE WRITTEN ({self.problem}); once more")
            self.problem = None
            self.begin(step, tensors, state)
            self.finish(limit_s=left())
            if self.problem is None:
                return
        raise OSError(self.problem)

    def close(self) -> None:
        """End the thread; what it writes is finished first."""
        self._thread.shutdown()

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        """A copy on the host, in memory that the last one used."""
        old = self._copies.get(name)
        if old is None or old.shape != tensor.shape or old.dtype != tensor.dtype:
            old = self._copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return old.copy_(tensor.detach())

    def _temporary(self, step: int) -> Path:
        return checkpoint_dir(self.run_dir, step).with_name(f".step-{step}.tmp")

    def _exchange(self, pending: _Pending, *, late: float | None) -> None:
        """Tell each other whether the work is done; then go on with the next part of it."""
        results = self.mesh.gather((_outcome(pending.work), late))
        limits = [limit for _, limit in results if limit is not None]
        waiting = [rank for rank, (outcome, _) in enumerate(results) if outcome is None]
        if waiting and not limits:
            return
        if waiting:
            who = f"rank {waiting[0]} was" if len(waiting) == 1 else f"ranks {', '.join(map(str, waiting))} were"
            limit_s = min(limits)
            self._end(f"{who} {STILL_WRITING} after {limit_s:.{0 if limit_s > 1 else 2}f} s")
            return
        problem = next((problem for outcome, _ in results if outcome for problem, _ in [outcome] if problem), "")
        if pending.sealing or problem:
            if problem and self.mesh.is_first:
                self._thread.submit(shutil.rmtree, self._temporary(pending.step), ignore_errors=True)
            self._end(problem)
            for outcome, _ in results:
                for remark in outcome[1].get("remarks", []) if outcome and pending.sealing else []:
                    self._say(remark)
            return
        written = {name: entry for outcome, _ in results if outcome for name, entry in outcome[1].items()}
        pending.sealing = True
        if self.mesh.is_first:
            pending.work = self._thread.submit(self._seal, pending.step, pending.state, written)
        else:
            pending.work = Future()
            pending.work.set_result({})

    def _end(self, problem: str) -> None:
        self._pending, self.problem = None, problem or None

    def _write(self, temporary: Path, copies: Mapping[str, Tensor]) -> dict[str, Any]:
        """This rank's part (on the thread)."""
        if self.mesh.is_first:
            # Of saves that were killed. The others write only after a collective that the first one joins below.
            for left in temporary.parent.glob(".step-*.tmp"):
                shutil.rmtree(left, ignore_errors=True)
        written = files.write_tensors(
            temporary, copies, rank=self.mesh.rank, group=self._group, no_dist=self.mesh.size == 1
        )
        if self.mesh.is_first:
            self.durable_first()
        return written

    def _seal(self, step: int, state: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
        """Make the checkpoint appear and remove old ones (on the first rank's thread); gives what is to be said."""
        temporary = self._temporary(step)
        foreign = sorted({path.name for path in temporary.glob(f"*{files.SUFFIX}")} - set(written))
        if foreign:
            raise OSError(f"{temporary / foreign[0]} is of an earlier attempt and cannot be removed; remove it")
        files.seal(temporary, state, written)
        put_folder(temporary, checkpoint_dir(self.run_dir, step))
        try:
            self._prune()
        except OSError as error:  # the checkpoint is there all the same
            return {
                "remarks": [f"old checkpoints could not be removed ({error}); remove them by hand if they take room"]
            }
        return {}

    def _prune(self) -> None:
        kept = []
        for step in list_steps(self.run_dir):
            try:
                state = read_state(self.run_dir, step)
            except DamagedCheckpointError:
                kept.append(Kept(step, good=False))
                continue
            kept.append(Kept(step, good=state.get("good", True), score=score_of(state, self.config)))
        stay = retained(kept, newest=self.config.keep, every=self.config.keep_every_n_steps)
        for checkpoint in kept:
            if checkpoint.step not in stay:
                remove_folder(checkpoint_dir(self.run_dir, checkpoint.step))


def _outcome(work: Future[Any]) -> tuple[str, dict[str, Any]] | None:
    """A problem or a result; None while there is neither."""
    if not work.done():
        return None
    try:
        return "", work.result()
    except TimeoutError as error:  # an OSError without a text
        return str(error) or "the disk did not answer in time", {}
    except (OSError, RuntimeError, SafetensorError) as error:
        return str(error) or type(error).__name__, {}


def score_of(state: Mapping[str, Any], config: CheckpointConfig) -> float | None:
    """The metric that ``checkpoint.best_by`` names, turned so that higher is better."""
    value = state.get("metrics", {}).get(config.best_by) if config.best_by else None
    if value is None or not math.isfinite(value):
        return None
    return -value if config.best_by == "loss" else value


def save(
    run_dir: str | Path,
    step: int,
    *,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    mesh: Mesh,
    keep: int,
) -> None:
    """Write one checkpoint and wait for it; all ranks call it, each with the tensors it holds.

    Raises:
        OSError: if it could not be written.
    """
    saver = Saver(run_dir, mesh, CheckpointConfig(keep=keep))
    try:
        saver.write(step, tensors, state)
    finally:
        saver.close()
