"""What the data side of a run can be told: where the data set lies and how it is cut into samples."""

from __future__ import annotations

from dataclasses import dataclass


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
    """

    dir: str = "data/factbook"
    fold: int = 0
    max_query_tokens: int = 32
    max_document_tokens: int = 224
    max_answer_tokens: int = 24
    image_size: int = 24

    def __post_init__(self) -> None:
        if self.fold not in (0, 1, 2, 3):
            raise ValueError(f"data.fold is {self.fold}; allowed are 0, 1, 2 and 3")
        for name in ("max_query_tokens", "max_document_tokens", "max_answer_tokens", "image_size"):
            if getattr(self, name) < 4:
                raise ValueError(f"data.{name} is {getattr(self, name)}; it must be at least 4")
