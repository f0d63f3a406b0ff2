"""Checkpoints: everything a run needs to go on as if nothing had happened, for any layout.

One checkpoint is a folder ``checkpoints/step-<n>`` (`retriever.checkpoint_files`): parameters and optimiser state
under their global names (``reader.<block.param>``, ``retriever.<param>``, ``optimizer.<name>.<state>``), and
``state.json`` with what is not a tensor. Random draws are keyed and the data order is a pure function, so the
step number is all of the random state. `rag_mm.saver` writes them, under a temporary name that is changed when all
is whole and durable; what is read here is therefore whole, or damaged, which its checksums tell.

Several machines that share a disk do not see the same files at the same moment. Ranks agree on the newest step that
any of them sees, and then wait, for a bounded time, until each of them sees its files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rag_mm.mesh import Mesh
from retriever import checkpoint_files as files
from retriever.checkpoint_files import DamagedCheckpointError, IncompleteCheckpointError
from retriever.shared_disk import patiently

STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def checkpoint_dir(run_dir: str | Path, step: int) -> Path:
    """Folder of the checkpoint after ``step`` steps."""
    return Path(run_dir) / "checkpoints" / f"step-{step}"


def list_steps(run_dir: str | Path) -> list[int]:
    """Steps of the whole checkpoints of a run, ascending.

    Raises:
        OSError: if they are there and cannot be listed, which must not be taken for none.
    """
    folder = Path(run_dir) / "checkpoints"
    try:
        names = [name for name in os.listdir(folder) if STEP.fullmatch(name)]
    except FileNotFoundError:
        return []
    return sorted(int(name[5:]) for name in names if _is_there(folder / name / files.STATE))


def _is_there(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def last_of(run_dir: str | Path) -> str:
    """What can be said of the last checkpoint, for a message."""
    try:
        steps = list_steps(run_dir)
    except OSError as error:
        return f"the checkpoints cannot be listed ({error})"
    return f"the last checkpoint is of step {steps[-1]}" if steps else "there is no checkpoint"


def read_state(run_dir: str | Path, step: int, *, wait_s: float = 0.0) -> dict[str, Any]:
    """``state.json`` of a checkpoint; a `DamagedCheckpointError` if it is not what was written.

    Args:
        wait_s: for a disk that shows late what is known to be there.
    """
    folder = checkpoint_dir(run_dir, step)
    return (
        patiently(lambda: files.read_state(folder), folder=folder, limit_s=wait_s)
        if wait_s
        else files.read_state(folder)
    )


def newest_usable(
    run_dir: str | Path, *, newest: int | None = None, wait_s: float = 0.0
) -> tuple[int | None, list[str]]:
    """The newest checkpoint that is as it was written, and what has to be said about newer ones that are not.

    Args:
        newest: step of one that another rank sees, if any.
        wait_s: longest wait for the files of one that is there.

    Raises:
        DamagedCheckpointError: if there are checkpoints and none is usable.
        PermissionError: if the newest may not be read, which is no damage.
    """
    said: list[str] = []
    for step in sorted({*list_steps(run_dir), *([] if newest is None else [newest])}, reverse=True):
        try:
            _verify(checkpoint_dir(run_dir, step), wait_s=wait_s)
        except PermissionError:
            raise
        except (DamagedCheckpointError, OSError) as error:
            said.append(f"CHECKPOINT OF STEP {step} IS NOT USED: {error}")
            continue
        return step, [*said, *([f"going back to the checkpoint of step {step}"] if said else [])]
    if said:
        raise DamagedCheckpointError(
            f"no checkpoint of {run_dir} is usable: {'; '.join(said)}; restore one from a copy, or begin anew with "
            "another --run-dir"
        )
    return None, []


def agree_on_newest(run_dir: str | Path, mesh: Mesh, *, wait_s: float) -> tuple[int | None, list[str]]:
    """`newest_usable`, the same on all ranks: of the steps that any rank sees, by what the first one reads.

    Raises:
        ValueError: on every rank, if there are checkpoints and none is usable.
        OSError: on every rank, if one of them cannot list or read them.
    """
    here: list[int] = []
    problem = ""
    try:
        here = list_steps(run_dir)
    except OSError as error:
        problem = f"rank {mesh.rank}: {error}"
    seen = mesh.gather((here, problem))
    for _, problem in seen:
        if problem:
            raise OSError(problem)
    newest = max((steps[-1] for steps, _ in seen if steps), default=None)
    found: tuple[int | None, list[str]] | Exception = (None, [])
    if mesh.is_first:
        try:
            found = newest_usable(run_dir, newest=newest, wait_s=wait_s)
        except DamagedCheckpointError as error:
            found = ValueError(str(error))
        except OSError as error:
            found = OSError(str(error))
    found = mesh.broadcast(found)
    if isinstance(found, Exception):
        raise found
    return found


def load(
    run_dir: str | Path, step: int, tensors: Mapping[str, Tensor], *, mesh: Mesh | None = None, wait_s: float = 0.0
) -> None:
    """Fill ``tensors`` in place from a checkpoint that any layout wrote; with a mesh, all its ranks call it.

    Args:
        wait_s: longest wait of a rank until it sees the files.

    Raises:
        FileNotFoundError: if the checkpoint does not exist.
        DamagedCheckpointError: if it is not what was written, on every rank.
        OSError: if it cannot be read, on every rank.
        ValueError: if a tensor is missing there or has another shape.
    """
    folder = checkpoint_dir(run_dir, step)
    rank, num_ranks = (0, 1) if mesh is None else (mesh.rank, mesh.size)
    problem: Exception | None = None
    try:
        _verify(folder, wait_s=wait_s, rank=rank, num_ranks=num_ranks)
    except FileNotFoundError:
        there = list_steps(run_dir) or "none"
        problem = FileNotFoundError(f"no checkpoint of step {step} in {run_dir}; there are {there}")
    except DamagedCheckpointError as error:
        problem = DamagedCheckpointError(str(error))
    except OSError as error:
        problem = OSError(f"rank {rank}: {error}")
    for found in [problem] if mesh is None else mesh.gather(problem):
        if found is not None:
            raise found
    files.load_tensors(tensors, folder, no_dist=num_ranks == 1, wait_s=wait_s)


def _verify(folder: Path, *, wait_s: float, rank: int = 0, num_ranks: int = 1) -> None:
    def read() -> None:
        files.verify(folder, rank=rank, num_ranks=num_ranks)

    patiently(read, folder=folder, limit_s=wait_s, until=(IncompleteCheckpointError,)) if wait_s else read()


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
