"""What the retriever can be told: its towers, and how its index is built and kept up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NO_TOWER = "none"
Frozen = Literal["none", "query", "document", "text", "image", "all"]


@dataclass(frozen=True)
class RetrieverConfig:
    """The dual encoder.

    Attributes:
        k: documents that every question reads.
        text: kind of text tower: trigrams (from scratch), none, or package.module:Class.
        image: kind of picture tower: small (from scratch), none, or package.module:Class.
        fusion: how a row's text and picture become one embedding: side by side, so that text is compared with text and
            pictures with pictures (blocks); averaged in one space, where a text finds a picture (mean); or that plus a
            small network that sees what is missing (learned).
        shared_dim: width of the one space of mean and learned, which a linear map brings each part to; 0: parts must
            have one width, and are taken as they are.
        towers: whether questions and documents share their towers, or have separate ones that start equal.
        freeze: what is not trained: nothing, all, the text or picture towers, or (separate towers only) a side.
        query_prefix: text put before every question, as some public models want it ("query: ").
        document_prefix: text put before every document's.
        text_buckets: hash buckets of the character trigrams.
        text_dim: width of the trigram tower's vectors; the noise of its scores falls with the root of it.
        image_dim: width of the picture tower's vectors.
        image_width: channels of the picture tower's convolutions.
        image_patch: side of its patches (pixels); must divide data.image_size.
        learned_gates: let training move the weights that trigrams start with (their idf).
        learned_text: let training move the trigram vectors (random, near-orthogonal, at the start).
    """

    k: int = 2
    text: str = "trigrams"
    image: str = "small"
    fusion: Literal["blocks", "mean", "learned"] = "blocks"
    shared_dim: int = 0
    towers: Literal["shared", "separate"] = "shared"
    freeze: Frozen = "none"
    query_prefix: str = ""
    document_prefix: str = ""
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
        if self.shared_dim < 0:
            raise ValueError(f"retriever.shared_dim is {self.shared_dim}; it must be 0 or more")
        if self.shared_dim and self.fusion == "blocks":
            raise ValueError(
                f"retriever.shared_dim is {self.shared_dim}, but retriever.fusion is 'blocks', which has no one space; "
                "use mean or learned, or leave it at 0"
            )
        if self.text == self.image == NO_TOWER:
            raise ValueError("retriever.text and retriever.image are both 'none'; at least one of them must be a tower")
        if self.freeze in ("query", "document") and self.towers == "shared":
            raise ValueError(
                f"retriever.freeze is {self.freeze!r}, but retriever.towers is 'shared'; use separate towers, or "
                "freeze text, image or all"
            )


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
