"""The questions of several data sets, one after another, as one sequence: what a `data.mixture.Mixture` orders."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from data.bad_data import BadData
from data.config import DataConfig
from data.dataset import Dataset, QuestionSet, Read
from data.samples import Sample


class MixedView:
    """Samples of several views; places count through the views laid end to end.

    Attributes:
        name: for messages.
        bad: broken samples met in this epoch, of all views.
    """

    def __init__(self, views: Mapping[str, QuestionSet]) -> None:
        self.name = "questions/train of " + ", ".join(views)
        self._views = list(views.values())
        self._starts = [0, *itertools.accumulate(len(view) for view in self._views)]
        self.bad = BadData(self.name, total=len(self))

    def __len__(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[Sample]:
        for view in self._views:
            yield from view

    def __getitem__(self, i: int) -> Sample:
        return self.read([i])[0]

    def scan(self) -> Iterator[Sample]:
        """All samples, for what they say; see `data.dataset.SplitView.scan`."""
        for view in self._views:
            yield from view.scan()

    def read(self, places: Sequence[int]) -> list[Sample]:
        """Several samples, in the order asked; one batched read a view."""
        return self._read(places, look=True, pictures=None)

    def read_unlooked(self, places: Sequence[int], *, pictures: Sequence[bool] | None = None) -> list[Sample]:
        """The same without a look at their pictures; see `data.dataset.SplitView.read_unlooked`."""
        return self._read(places, look=False, pictures=pictures)

    def condemn(self, place: int, problem: str) -> None:
        """Count a sample as bad whose picture turned out to be broken."""
        number = next(i for i, stop in enumerate(self._starts[1:]) if place < stop)
        key, shard = self._views[number].place(place - self._starts[number])
        self.bad.record(place, problem, key=key, shard=shard)

    def _read(self, places: Sequence[int], *, look: bool, pictures: Sequence[bool] | None) -> list[Sample]:
        found: dict[int, Read[Sample]] = {}
        with_picture = set(places if pictures is None else itertools.compress(places, pictures))
        for view, start, stop in zip(self._views, self._starts[:-1], self._starts[1:], strict=True):
            mine = [place for place in dict.fromkeys(places) if start <= place < stop]
            reads = view.read_with_reasons(
                [place - start for place in mine], look=look,
                pictures=None if pictures is None else [place in with_picture for place in mine],
            )  # fmt: skip
            found |= zip(mine, reads, strict=True)
        for place, read in found.items():
            self.bad.record(place, read.problem, key=read.key, shard=read.shard)
        return [found[place].item for place in places]

    def will_need(self, places: range, *, pictures: bool = True) -> None:
        """Have the samples at consecutive places, all of one view, read ahead, with their pictures or without."""
        view = next(i for i, stop in enumerate(self._starts[1:]) if places.start < stop)
        mine = range(places.start - self._starts[view], places.stop - self._starts[view])
        self._views[view].will_need(mine, pictures=pictures)


def mixed_datasets(config: DataConfig, dataset: Dataset) -> dict[str, Dataset]:
    """The data sets that ``data.mixture`` names, by name; empty without one."""
    return {name: dataset if name == config.dir else Dataset.of(config, directory=name) for name in config.mixture}


def check_mixed(mixed: Mapping[str, Dataset], dataset: Dataset) -> None:
    """Whether the memory, which is that of ``dataset``, holds all documents that the mixed questions name.

    Raises:
        ValueError: names the data set and the document.
    """
    for name, other in mixed.items():
        if other is dataset:
            continue
        for document in other.asked_documents():
            if document not in dataset.store:
                raise ValueError(
                    f"data.mixture names {name!r}, whose questions ask about document {document!r}; the memory is that "
                    f"of {dataset.directory} and does not hold it"
                )
        other.check_documents(dataset.store)


def training_questions(dataset: Dataset, mixed: Mapping[str, Dataset]) -> QuestionSet | MixedView:
    """The questions that training reads: those of ``dataset``, or of the data sets that are mixed."""
    if not mixed:
        return dataset.questions("train")
    views = {name: one.questions("train") for name, one in mixed.items()}
    for name, view in views.items():
        if not len(view):
            raise ValueError(f"data.mixture names {name!r}, which has no training questions; leave it out")
    return MixedView(views)
