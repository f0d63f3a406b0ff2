"""What the retriever can be told: its towers, and how its index is built and kept up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RetrieverConfig:
    """The dual encoder.

    Attributes:
        k: documents that every question reads.
        text_buckets: hash buckets of the character trigrams.
        text_dim: width of the text block of an embedding; the noise of its scores falls with the root of it.
        image_dim: width of the picture block of an embedding.
        image_width: channels of the picture tower's convolutions.
        image_patch: side of its patches (pixels); must divide data.image_size.
        learned_gates: let training move the weights that trigrams start with (their idf).
        learned_text: let training move the trigram vectors (random, near-orthogonal, at the start).
    """

    k: int = 2
    text_buckets: int = 4096
    text_dim: int = 1024
    image_dim: int = 128
    image_width: int = 48
    image_patch: int = 4
    learned_gates: bool = True
    learned_text: bool = False

    def __post_init__(self) -> None:
        for name in ("k", "text_buckets", "text_dim", "image_dim", "image_width", "image_patch"):
            if getattr(self, name) < 1:
                raise ValueError(f"retriever.{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True)
class IndexConfig:
    """The index over the document store.

    Attributes:
        dir: index folder that ``python -m retriever.build`` writes; training keeps its own in the run folder.
        checkpoint: training checkpoint whose retriever embeds the documents; empty: the untrained one.
        batch_size: documents embedded at once.
        refresh_every_n_steps: training embeds the whole memory anew after this many steps; 0: never.
        keep_versions: published versions kept besides those that a checkpoint names.
    """

    dir: str = "runs/index"
    checkpoint: str = ""
    batch_size: int = 256
    refresh_every_n_steps: int = 100
    keep_versions: int = 2

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"index.batch_size is {self.batch_size}; it must be at least 1")
        if self.refresh_every_n_steps < 0:
            raise ValueError(f"index.refresh_every_n_steps is {self.refresh_every_n_steps}; 0 (never) or more")
        if self.keep_versions < 1:
            raise ValueError(f"index.keep_versions is {self.keep_versions}; it must be at least 1")
