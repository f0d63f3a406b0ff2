"""What the data side of a run can be told: where the data set lies and how it is cut into samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from data import transforms
from data.mixture import shares


@dataclass(frozen=True)
class DataConfig:
    """The data set and the shapes its samples take.

    Attributes:
        dir: data set folder written by ``python -m data.prepare``.
        fold: which of the four folds of entities is held out as the test split (0 to 3).
        max_query_tokens: longer questions are truncated, counted and reported (tokens).
        max_document_tokens: longer documents are truncated, counted and reported (tokens).
        max_answer_tokens: longer answers are truncated, counted and reported (tokens, end mark included).
        image_size: side of the square that every picture is resized to (pixels).
        image_transform: how a picture comes to that square: square (trimmed and resized), or cropped and resized as the
            preprocessing of a public model, open_clip:MODEL[:PRETRAINED] or torchvision:WEIGHTS.
        max_bad_share: training stops when a larger share of the samples read is broken (0 to 1).
        shuffle_chunk: neighbouring samples that stay close in the order, and are read close in time (samples).
        shuffle_window: samples that are shuffled among each other, a multiple of shuffle_chunk; data that is not larger
            is shuffled as a whole.
        mixture: share of each of several data sets among the questions, as folder: weight, kept exactly; the memory and
            the pairs are those of dir, which is named here too if its questions count (default: dir alone).
        tail: where an epoch does not divide into batches: wrap into the next epoch, pad with samples of weight 0, or
            drop the rest.
        documents: the document store, a folder or a URL that fsspec can read, where it is not the data set's own.
        at_edit: read the documents as they were after so many edits of the store (default: after the last).
        cache_dir: folder on a disk of each node for copies of the documents' shards, made while training (empty: none).
        cache_gib: all copies in cache_dir together are at most so large (GiB).
        tokenizer: folder of any transformers tokenizer (default: the one of the data set).
        workers: processes of each rank that read and decode the next steps' samples while a step runs (0: none).
    """

    dir: str = "data/factbook"
    fold: int = 0
    max_query_tokens: int = 32
    max_document_tokens: int = 224
    max_answer_tokens: int = 24
    image_size: int = 24
    image_transform: str = transforms.SQUARE
    max_bad_share: float = 0.01
    shuffle_chunk: int = 256
    shuffle_window: int = 64 * 256
    mixture: dict[str, float] = field(default_factory=dict)
    tail: Literal["wrap", "pad", "drop"] = "wrap"
    documents: str = ""
    at_edit: int | None = None
    cache_dir: str = ""
    cache_gib: float = 1024.0
    tokenizer: str = ""
    workers: int = 0

    def __post_init__(self) -> None:
        if self.fold not in (0, 1, 2, 3):
            raise ValueError(f"data.fold is {self.fold}; allowed are 0, 1, 2 and 3")
        for name in ("max_query_tokens", "max_document_tokens", "max_answer_tokens", "image_size"):
            if getattr(self, name) < 4:
                raise ValueError(f"data.{name} is {getattr(self, name)}; it must be at least 4")
        transforms.check(self.image_transform)
        if self.shuffle_chunk < 1:
            raise ValueError(f"data.shuffle_chunk is {self.shuffle_chunk}; it must be at least 1")
        if self.shuffle_window < 1 or self.shuffle_window % self.shuffle_chunk:
            raise ValueError(
                f"data.shuffle_window is {self.shuffle_window}; it must be a multiple of data.shuffle_chunk "
                f"({self.shuffle_chunk})"
            )
        if self.at_edit is not None and self.at_edit < 0:
            raise ValueError(f"data.at_edit is {self.at_edit}; it must be at least 0")
        if not 0 < self.cache_gib < math.inf:
            raise ValueError(f"data.cache_gib is {self.cache_gib}; it must be a number above 0")
        if self.mixture:
            try:
                shares(self.mixture)
            except ValueError as error:
                raise ValueError(f"data.mixture: {error}") from None
            if self.tail != "wrap":
                raise ValueError(
                    f"data.tail is {self.tail!r}, but the data sets of data.mixture end their epochs at different "
                    "places; use wrap"
                )
        if self.workers < 0:
            raise ValueError(f"data.workers is {self.workers}; it must be 0 or more")
        if not 0 <= self.max_bad_share <= 1:
            raise ValueError(f"data.max_bad_share is {self.max_bad_share}; it must be from 0 (none) to 1 (all)")
