"""Checkpoints: everything a run needs to go on as if nothing had happened, for any layout.

One checkpoint is a folder ``checkpoints/step-<n>`` (`retriever.checkpoint_files`): parameters and optimiser state
under their global names (``reader.<block.param>``, ``retriever.<param>``, ``optimizer.<name>.<state>``), and
``state.json`` with what is not a tensor. Random draws are keyed and the data order is a pure function, so the
step number is all of the random state. The folder is written under a temporary name and renamed
when whole and durable.

Training waits only for a copy of the tensors; a thread writes them while the next steps run, and the checkpoint
appears at the end of a later step, when all ranks have written. That costs the memory of one copy, and at most
one checkpoint is on its way at a time.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rag_mm.config import CheckpointConfig
from rag_mm.mesh import Mesh
from rag_mm.retention import Kept, retained
from retriever import checkpoint_files as files
from retriever.checkpoint_files import DamagedCheckpointError
from retriever.durable_files import sync

STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def checkpoint_dir(run_dir: str | Path, step: int) -> Path:
    """Folder of the checkpoint after ``step`` steps."""
    return Path(run_dir) / "checkpoints" / f"step-{step}"


def list_steps(run_dir: str | Path) -> list[int]:
    """Steps of the whole checkpoints of a run, ascending."""
    folder = Path(run_dir) / "checkpoints"
    if not folder.is_dir():
        return []
    steps = [p for p in folder.glob("step-*") if STEP.fullmatch(p.name)]
    return sorted(int(p.name[5:]) for p in steps if (p / files.STATE).exists())


def read_state(run_dir: str | Path, step: int) -> dict[str, Any]:
    """``state.json`` of a checkpoint; a `DamagedCheckpointError` if it is not what was written."""
    return files.read_state(checkpoint_dir(run_dir, step))


def newest_usable(run_dir: str | Path) -> tuple[int | None, list[str]]:
    """The newest checkpoint that is as it was written, and what has to be said about newer ones that are not.

    Raises:
        DamagedCheckpointError: if there are checkpoints and none is usable.
    """
    said: list[str] = []
    for step in reversed(list_steps(run_dir)):
        try:
            files.verify(checkpoint_dir(run_dir, step))
        except DamagedCheckpointError as error:
            said.append(f"CHECKPOINT OF STEP {step} IS NOT USED: {error}")
            continue
        return step, [*said, *([f"going back to the checkpoint of step {step}"] if said else [])]
    if said:
        raise DamagedCheckpointError(
            f"no checkpoint of {run_dir} is usable: {'; '.join(said)}; restore one from a copy, or begin anew with "
            "another --run-dir"
        )
    return None, []


def load(run_dir: str | Path, step: int, tensors: Mapping[str, Tensor], *, mesh: Mesh | None = None) -> None:
    """Fill ``tensors`` in place from a checkpoint that any layout wrote; with a mesh, all its ranks call it.

    Raises:
        FileNotFoundError: if the checkpoint does not exist.
        DamagedCheckpointError: if it is not what was written, on every rank.
        ValueError: if a tensor is missing there or has another shape.
    """
    folder = checkpoint_dir(run_dir, step)
    if not (folder / files.STATE).exists():
        raise FileNotFoundError(f"no checkpoint of step {step} in {run_dir}; there are {list_steps(run_dir) or 'none'}")
    rank, num_ranks = (0, 1) if mesh is None else (mesh.rank, mesh.size)
    problem = ""
    try:
        files.verify(folder, rank=rank, num_ranks=num_ranks)
    except DamagedCheckpointError as error:
        problem = str(error)
    problems = [problem] if mesh is None else mesh.gather(problem)
    for problem in problems:
        if problem:
            raise DamagedCheckpointError(problem)
    files.load_tensors(tensors, folder, no_dist=num_ranks == 1)


@dataclass
class _Pending:
    step: int
    state: dict[str, Any]
    written: Future[dict[str, Any]]


class Saver:
    """Writes the checkpoints of a run beside its steps.

    Every method is called by all ranks alike, between steps.

    Args:
        config: how many are kept, and which.
        timeout_s: longest wait of a rank for the others' files.

    Attributes:
        pending_state: of the checkpoint that is being written, if there is one.
        problem: why the last one could not be written, or None.
    """

    def __init__(self, run_dir: str | Path, mesh: Mesh, config: CheckpointConfig, *, timeout_s: float = 1800.0) -> None:
        self.run_dir, self.mesh, self.config = Path(run_dir), mesh, config
        self.problem: str | None = None
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
        temporary = self._temporary(step)
        problem = ""
        if self.mesh.is_first:
            try:
                for left in temporary.parent.glob(".step-*.tmp"):  # of saves that were killed
                    shutil.rmtree(left)
                temporary.mkdir(parents=True)
            except OSError as error:
                problem = str(error)
        problem = self.mesh.broadcast(problem)
        whole = {"step": step, **state, "good": bool(state.get("good", True)) and sound}
        if problem:
            written: Future[dict[str, Any]] = Future()
            written.set_exception(OSError(problem))
        else:
            written = self._thread.submit(
                files.write_tensors,
                temporary,
                copies,
                rank=self.mesh.rank,
                group=self._group,
                no_dist=self.mesh.size == 1,
            )
        self._pending = _Pending(step, whole, written)

    def poll(self) -> bool:
        """Publish the checkpoint that is being written if all ranks are done; gives whether one is left."""
        if self._pending is not None and all(self.mesh.gather(self._pending.written.done())):
            self._publish(self._pending)
        return self._pending is not None

    def finish(self, *, limit_s: float | None = None) -> None:
        """Wait for the checkpoint that is being written, at most ``limit_s`` seconds, and publish it."""
        if self._pending is not None:
            self._publish(self._pending, limit_s=limit_s)

    def close(self) -> None:
        """End the thread; what it writes is finished first, but not published."""
        self._thread.shutdown()

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        """A copy on the host, in memory that the last one used."""
        old = self._copies.get(name)
        if old is None or old.shape != tensor.shape or old.dtype != tensor.dtype:
            old = self._copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return old.copy_(tensor.detach())

    def _temporary(self, step: int) -> Path:
        return checkpoint_dir(self.run_dir, step).with_name(f".step-{step}.tmp")

    def _publish(self, pending: _Pending, *, limit_s: float | None = None) -> None:
        try:
            result: tuple[str, dict[str, Any]] = ("", pending.written.result(timeout=limit_s))
        except TimeoutError:  # an OSError without a text
            result = (f"rank {self.mesh.rank} had not written its part after {limit_s:g} s", {})
        except (OSError, RuntimeError) as error:
            result = (f"{error}", {})
        results = self.mesh.gather(result)
        problem = next((problem for problem, _ in results if problem), "")
        self._pending = None
        if self.mesh.is_first:
            try:
                if problem:
                    shutil.rmtree(self._temporary(pending.step), ignore_errors=True)
                else:
                    self._rename(pending, {name: entry for _, written in results for name, entry in written.items()})
            except OSError as error:
                problem = str(error)
        self.problem = self.mesh.broadcast(problem) or None

    def _rename(self, pending: _Pending, written: Mapping[str, Any]) -> None:
        temporary, final = self._temporary(pending.step), checkpoint_dir(self.run_dir, pending.step)
        files.seal(temporary, pending.state, written)
        if final.exists():  # a run that went back to an earlier checkpoint comes by again
            shutil.rmtree(final)
        temporary.rename(final)
        sync(final.parent)
        self._prune()

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
                shutil.rmtree(checkpoint_dir(self.run_dir, checkpoint.step))


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
    saver.begin(step, tensors, state)
    saver.finish()
    saver.close()
    if saver.problem:
        raise OSError(saver.problem)


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The optimiser's state by parameter name, zeros where a parameter has had no step yet (made in place)."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in names.items():
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        tensors |= {f"optimizer.{name}.{moment}": state[moment] for moment in MOMENTS}
    return tensors
