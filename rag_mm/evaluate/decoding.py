"""How answers are decoded: the section ``evaluate`` of a configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

# Fields that only one way of decoding reads.
_ONLY = {"num_beams": "beam", "length_penalty": "beam", "candidates": "score", "score_by": "score"}


@dataclass(frozen=True)
class DecodingConfig:
    """How answers are decoded. Of equally likely tokens the one with the smallest id is taken, of equally likely
    candidates the first.

    Attributes:
        decoding: the likeliest token each time (greedy), the best of several hypotheses (beam), or the likeliest of
            given answers (score).
        num_beams: hypotheses of beam.
        length_penalty: of beam: an answer counts its log-likelihood / tokens ** length_penalty.
        candidates: of score: a file with the answers to choose from, JSON {field: [answers]} or one answer a line;
            empty: the answers of the training questions of the question's field.
        score_by: of score: an answer counts the sum of its tokens' log-probabilities, or their mean, which does not
            prefer short answers.
        batch_size: questions that a replica decodes at once; changes no answer.
    """

    decoding: Literal["greedy", "beam", "score"] = "greedy"
    num_beams: int = 4
    length_penalty: float = 1.0
    candidates: str = ""
    score_by: Literal["sum", "mean"] = "sum"
    batch_size: int = 64

    def __post_init__(self) -> None:
        if self.decoding not in ("greedy", "beam", "score"):
            raise ValueError(f"evaluate.decoding is {self.decoding!r}; allowed: greedy, beam, score")
        if self.score_by not in ("sum", "mean"):
            raise ValueError(f"evaluate.score_by is {self.score_by!r}; allowed: sum, mean")
        for name in ("num_beams", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"evaluate.{name} is {getattr(self, name)}; it must be at least 1")
        defaults = {field.name: field.default for field in fields(self)}
        for name, decoding in _ONLY.items():
            value = getattr(self, name)
            if value != defaults[name] and self.decoding != decoding:
                raise ValueError(
                    f"evaluate.{name} is {value!r}, which evaluate.decoding {self.decoding} does not use; "
                    f"set evaluate.decoding to {decoding} or leave it out"
                )
