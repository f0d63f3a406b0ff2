"""The retriever's weights out of a training checkpoint, whatever layout wrote it."""

from __future__ import annotations

from pathlib import Path

from retriever.checkpoint_files import load_tensors, verify
from retriever.encoder import DualEncoder


def load_weights(encoder: DualEncoder, checkpoint: str | Path) -> None:
    """Take the retriever's weights from a training checkpoint.

    Raises:
        FileNotFoundError: if there is no checkpoint there.
        ValueError: if it is damaged, or holds another retriever.
    """
    verify(Path(checkpoint))
    state = {f"retriever.{name}": tensor for name, tensor in encoder.state_dict().items()}
    load_tensors(state, Path(checkpoint), no_dist=True)
