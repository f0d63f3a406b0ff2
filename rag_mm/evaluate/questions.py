"""Which questions are asked: their words are held, their pictures are read when it is their turn.

A split may have hundreds of thousands of questions with a picture each. One pass over the shards finds those that are
whole (a broken one is left out and counted) and keeps what they say; whoever needs a picture reads it again, a window
of neighbours at a time, so that memory follows the words alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from data.dataset import Dataset, QuestionSet, Sample
from data.factbook_questions import stable_hash
from rag_mm.evaluate.retrieval import DEPTH


class Questions(Sequence[Sample]):
    """The questions of a split, in the order they are asked; items and slices are read anew, picture and all.

    Args:
        view: the split they are of.
        num: only that many, chosen by a hash of their ids; 0: all.

    Attributes:
        name: for messages, such as "questions/test".
        words: the same without pictures, which cost no reading.
    """

    def __init__(self, view: QuestionSet, num: int = 0) -> None:
        whole = [(place, dataclasses.replace(s, image=None)) for place, s in enumerate(view) if s.weight]
        if num:
            whole = sorted(whole, key=lambda pair: stable_hash("evaluate", pair[1].id))[:num]
        self._take(view, whole)

    @classmethod
    def none(cls, view: QuestionSet) -> Questions:
        """None of a split's, for which nothing is read."""
        questions = cls.__new__(cls)
        questions._take(view, [])
        return questions

    def _take(self, view: QuestionSet, whole: Sequence[tuple[int, Sample]]) -> None:
        self._view, self.name = view, view.name
        self._places = [place for place, _ in whole]
        self.words = [sample for _, sample in whole]

    def __len__(self) -> int:
        return len(self.words)

    @overload
    def __getitem__(self, i: int) -> Sample: ...
    @overload
    def __getitem__(self, i: slice) -> list[Sample]: ...
    def __getitem__(self, i: int | slice) -> Sample | list[Sample]:
        if isinstance(i, slice):
            return self._view.read_unlooked(self._places[i])
        return self._view.read_unlooked([self._places[i]])[0]

    def __iter__(self) -> Iterator[Sample]:
        for place in self._places:
            yield self._view.read_unlooked([place])[0]

    def of(self, samples: Sequence[Sample]) -> list[Sample]:
        """Some of them, picture and all, from what ``words`` says of them."""
        return self._view.read_unlooked([self._place[sample.id] for sample in samples])

    @functools.cached_property
    def _place(self) -> dict[str, int]:
        return {sample.id: place for place, sample in zip(self._places, self.words, strict=True)}

    @property
    def left_out(self) -> dict[str, int]:
        """How many of the split's questions are broken, by reason."""
        return dict(self._view.bad_samples)


def words_of(samples: Sequence[Sample]) -> Sequence[Sample]:
    """The samples for what they say: nothing is read for it, and their pictures may be missing."""
    return samples.words if isinstance(samples, Questions) else samples


@dataclass(frozen=True)
class QuestionsConfig:
    """Which questions are asked.

    Attributes:
        split: test for results, dev for choices.
        num: only that many questions, chosen by a hash of their ids; 0: all.
        depth: documents that are searched for (or k, if that is more).
    """

    split: str = "test"
    num: int = 0
    depth: int = DEPTH

    @property
    def name(self) -> str:
        """The stem of the result files: the split, and how many of its questions if not all."""
        return f"{self.split}-{self.num}" if self.num else self.split

    def of(self, dataset: Dataset) -> Questions:
        """The questions, broken ones left out."""
        return Questions(dataset.questions(self.split), self.num)
