"""Checkpoints: everything a run needs to go on as if nothing had happened, for any layout.

One checkpoint is a folder ``checkpoints/step-<n>``: the shards of ``torch.distributed.checkpoint`` with
parameters and optimiser state under their global names (``reader.<block.param>``, ``retriever.<param>``,
``optimizer.<name>.<state>``), and ``state.json`` with what is not a tensor. Random draws are keyed and the
data order is a pure function, so the step number is all of the random state and of the data cursor. The
folder is written under a temporary name and renamed when whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from rag_mm.mesh import Mesh
from retriever.weights import load_tensors, one_process_is_wanted

STATE = "state.json"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def checkpoint_dir(run_dir: str | Path, step: int) -> Path:
    """Folder of the checkpoint after ``step`` steps."""
    return Path(run_dir) / "checkpoints" / f"step-{step}"


def list_steps(run_dir: str | Path) -> list[int]:
    """Steps of the whole checkpoints of a run, ascending."""
    folder = Path(run_dir) / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted(int(p.name[5:]) for p in folder.glob("step-*") if p.name[5:].isdigit() and (p / STATE).exists())


def read_state(run_dir: str | Path, step: int) -> dict[str, Any]:
    """``state.json`` of a checkpoint."""
    return json.loads((checkpoint_dir(run_dir, step) / STATE).read_text())


def save(
    run_dir: str | Path,
    step: int,
    *,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    mesh: Mesh,
    keep: int,
) -> None:
    """Write a checkpoint; all ranks call it, each with the tensors it holds.

    Args:
        keep: older checkpoints beyond this number are deleted, after the new one is whole.
    """
    final = checkpoint_dir(run_dir, step)
    temporary = final.with_name(f".{final.name}.tmp")
    if mesh.is_first:
        for left in final.parent.glob(".step-*.tmp"):  # of saves that were killed
            shutil.rmtree(left)
        temporary.mkdir(parents=True)
    mesh.barrier()
    writer = dcp.FileSystemWriter(str(temporary), sync_files=True)
    with one_process_is_wanted():
        dcp.save(dict(tensors), storage_writer=writer, no_dist=mesh.size == 1)
    if mesh.is_first:
        path = temporary / STATE
        with path.open("w") as file:
            json.dump({"step": step, **state}, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        for old in list_steps(run_dir)[:-keep]:
            shutil.rmtree(checkpoint_dir(run_dir, old))
    mesh.barrier()


def load(run_dir: str | Path, step: int, tensors: Mapping[str, Tensor], *, mesh: Mesh | None = None) -> None:
    """Fill ``tensors`` in place from a checkpoint that any layout wrote.

    Raises:
        FileNotFoundError: if the checkpoint does not exist.
        ValueError: if a tensor is missing there or has another shape.
    """
    folder = checkpoint_dir(run_dir, step)
    if not (folder / STATE).exists():
        raise FileNotFoundError(f"no checkpoint of step {step} in {run_dir}; there are {list_steps(run_dir) or 'none'}")
    load_tensors(tensors, folder, no_dist=mesh is None or mesh.size == 1)


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
