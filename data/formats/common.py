"""What can be asked of every format."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from data.passages import Chunking


@dataclass(frozen=True)
class Common:
    """What can be asked of every format.

    Attributes:
        out: the folder to make.
        workers: processes.
        chunking: how documents are cut into passages.
        rows_per_shard: lines or rows of a source a shard is made of; 0: what suits the format.
        max_bad_share: pictures that may be missing or broken, or samples lost in damaged tars, as a share of all items.
        vocabulary: entries of the tokenizer trained on the texts; 0: none is trained.
        licence: of the data, as the user knows it.
        memory: a prepared data set whose documents are taken instead of the format's own.
    """

    out: Path
    workers: int = 1
    chunking: Chunking = field(default_factory=Chunking)
    rows_per_shard: int = 0
    max_bad_share: float = 0.01
    vocabulary: int = 8000
    licence: str = "unknown"
    memory: Path | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"--workers is {self.workers}; it must be at least 1")
        if self.rows_per_shard < 0:
            raise ValueError(f"--rows-per-shard is {self.rows_per_shard}; it must be 0 (what suits the format) or more")
        if not 0 <= self.max_bad_share <= 1:
            raise ValueError(f"--max-bad-share is {self.max_bad_share}; it must be between 0 and 1")
        if self.vocabulary and self.vocabulary < 300:
            raise ValueError(f"--vocabulary is {self.vocabulary}; it must be 0 (none) or at least 300 (256 are bytes)")
        if self.memory is not None and self.chunking.words:
            raise ValueError("--passage-words cuts documents, but --memory brings documents that are cut already")
