"""Tensors by name out of a training checkpoint, whatever layout wrote it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from retriever.encoder import DualEncoder


def load_weights(encoder: DualEncoder, checkpoint: str | Path) -> None:
    """Take the retriever's weights from a training checkpoint.

    Raises:
        FileNotFoundError: if there is no checkpoint there.
        ValueError: if it holds another retriever.
    """
    if not (Path(checkpoint) / ".metadata").exists():
        raise FileNotFoundError(f"no checkpoint at {checkpoint}; expected a folder such as RUN/checkpoints/step-900")
    state = {f"retriever.{name}": tensor for name, tensor in encoder.state_dict().items()}
    load_tensors(state, Path(checkpoint), no_dist=True)


def load_tensors(tensors: Mapping[str, Tensor], checkpoint: Path, *, no_dist: bool) -> None:
    """Fill tensors in place.

    Raises:
        ValueError: if one is missing in the checkpoint or has another shape there; names the checkpoint.
    """
    with one_process_is_wanted():
        try:
            dcp.load(dict(tensors), checkpoint_id=str(checkpoint), no_dist=no_dist)
        except CheckpointException as error:
            causes = "; ".join(sorted({str(cause) for cause, _ in error.failures.values()}))
            raise ValueError(f"the checkpoint {checkpoint} does not fit this configuration: {causes}") from error


@contextmanager
def one_process_is_wanted() -> Iterator[None]:
    """Keep torch from warning that a checkpoint is read or written without torch.distributed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
