"""The part of a training step that waits for no weights: its samples, what the towers take of them, its renaming.

All of it is a pure function of the step, so workers can compute it while the step before runs (`data.ahead`); with
or without them the numbers are the same. Documents are not in it: which are read depends on the weights that the
step before leaves behind.

A picture is read and decoded by the ranks that compute with it and by no others, so only they learn that it is broken.
They say so in ``broken``; the step exchanges that and has every rank empty the same samples (`Queries.mended`).

Shapes: B questions, F pairs, Q = B + F queries.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from data.announcing import Announcer
from data.cursor import Slots
from data.dataset import Dataset, PairSet, QuestionSet
from data.mixed_view import MixedView, mixed_datasets, training_questions
from data.samples import Pair, Sample, emptied
from rag_mm.augmentation import augment
from rag_mm.config import Config
from rag_mm.renaming import Renaming
from rag_mm.role import Role
from rag_mm.streams import Name, Streams
from retriever.embed import pictures
from retriever.features import Featurizer

Item = TypeVar("Item", Sample, Pair)
Seen = tuple[str, int, str | None, str, Path]  # view, position, problem, key, shard


@dataclass(frozen=True)
class QueryBatch:
    """What `Queries` computes of one step.

    Attributes:
        samples, pairs: B questions and F pairs; weight 0 and nothing to find where a slot only fills up an epoch.
        features: of the Q queries.
        renaming: of the facts in this step, if there is any.
        broken: rows of the Q queries whose picture this rank found to be broken, and why; not mended yet.
        seen: samples that a worker read for it, for the counts of bad ones (which count each once an epoch).
        truncated: query texts that the retriever's text tower got cut off.
    """

    samples: list[Sample]
    pairs: list[Pair]
    features: dict[str, Tensor]
    renaming: Renaming | None
    broken: dict[int, str] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    truncated: int = 0

    def pin_memory(self) -> QueryBatch:
        """The same with the features in pinned memory; torch's loader asks for it where there is a GPU."""
        return dataclasses.replace(self, features={name: tensor.pin_memory() for name, tensor in self.features.items()})


class Queries:
    """Reads and prepares.

    Args:
        usable_pairs: positions of the pairs that may be used.
        values: of each field, for renaming.
        role: which pictures are decoded; None: all.
    """

    def __init__(
        self,
        config: Config,
        questions: QuestionSet | MixedView,
        pairs: PairSet,
        *,
        usable_pairs: Sequence[int],
        streams: Streams,
        values: Mapping[str, Sequence[str]],
        role: Role | None = None,
    ) -> None:
        self.config, self.questions, self.pairs = config, questions, pairs
        self.usable_pairs, self.streams, self.values, self.role = usable_pairs, streams, values, role
        self.featurizer = Featurizer(config.encoder)
        self._announcers: dict[Name, Announcer] = {}

    def samples(self, step: int) -> tuple[list[Sample], list[Pair]]:
        """The questions and pairs of a step: a pure function of data, seed and step.

        Pictures that the role does not want are `data.image_formats.Unread`.
        """
        self._announce(self._asking(step), step)
        self._announce("pairs", step)
        asked, paired = self.streams.slots(self._asking(step), step), self.streams.slots("pairs", step)
        asked_places, paired_places = self._places(step)
        num, wanted = len(asked_places), self._wanted(len(asked_places), len(paired_places))
        of_asked, of_paired = (None, None) if wanted is None else (wanted[:num].tolist(), wanted[num:].tolist())
        questions = self.questions.read_unlooked(asked_places, pictures=of_asked)
        pairs = self.pairs.read_unlooked(paired_places, pictures=of_paired)
        return [] if asked is None else _filled(questions, asked), [] if paired is None else _filled(pairs, paired)

    def _asking(self, step: int) -> Name:
        return "questions" if self.streams.reads(step) else "questions alone"

    def _places(self, step: int) -> tuple[list[int], list[int]]:
        """Where the questions and the pairs of a step stand in their sets."""
        asked, paired = self.streams.slots(self._asking(step), step), self.streams.slots("pairs", step)
        return (
            [] if asked is None else asked.positions.tolist(),
            [] if paired is None else [self.usable_pairs[i] for i in paired.positions.tolist()],
        )

    def _announce(self, name: Name, step: int) -> None:
        """Windows that begin in this step's batch of a stream, to the file system; the present one at the start."""
        if not self.streams.flows(name, step) or name not in self.streams.batches:
            return
        number = self.streams.number(name, step)
        if name not in self._announcers:
            pictures = self.role is None or self.role.on_one_machine
            announced = self._pairs_will_need if name == "pairs" else self.questions.will_need
            will_need = functools.partial(announced, pictures=pictures)
            self._announcers[name] = Announcer(self.streams.batches[name], will_need, first=number)
        self._announcers[name].before(number)

    def _pairs_will_need(self, places: range, *, pictures: bool) -> None:
        usable = range(self.usable_pairs[places.start], self.usable_pairs[places.stop - 1] + 1)
        self.pairs.will_need(usable, pictures=pictures)

    def batch(self, samples: list[Sample], pairs: list[Pair], step: int) -> QueryBatch:
        """The same with what the towers take of the Q queries, and the renaming."""
        images = [s.image for s in samples] + [p.image for p in pairs]
        broken: dict[int, str] = {}
        image, has_image = step_pictures(
            self.config, images, _names(samples, pairs), step=step, wanted=self._wanted(len(samples), len(pairs)),
            broken=broken,
        )  # fmt: skip
        before = self.featurizer.truncated
        made = self.featurizer(_texts(samples, pairs), image, has_image, side="query")
        truncated = self.featurizer.truncated - before
        return QueryBatch(samples, pairs, made, self.renaming(step), broken, truncated=truncated)

    def mended(self, batch: QueryBatch, step: int, broken: Mapping[int, str]) -> QueryBatch:
        """The batch with the queries of these rows emptied, bit for bit as if they never had held anything.

        Args:
            broken: what is wrong with them, as all ranks together know.
        """
        if not broken:
            return batch
        num = len(batch.samples)
        samples = [emptied(sample) if i in broken else sample for i, sample in enumerate(batch.samples)]
        pairs = [emptied(pair) if num + i in broken else pair for i, pair in enumerate(batch.pairs)]
        image, has_image = without_pictures(
            self.config, batch.features["image"], batch.features["has_image"], _names(samples, pairs), step=step,
            wanted=self._wanted(len(samples), len(pairs)), broken=broken,
        )  # fmt: skip
        made = self.featurizer(_texts(samples, pairs), image, has_image, side="query")
        return QueryBatch(samples, pairs, made, batch.renaming, dict(broken), batch.seen, batch.truncated)

    def condemn(self, step: int, broken: Mapping[int, str]) -> None:
        """Count the queries of these rows of a step as bad."""
        asked, paired = self._places(step)
        for row, problem in broken.items():
            if row < len(asked):
                self.questions.condemn(asked[row], problem)
            else:
                self.pairs.condemn(paired[row - len(asked)], problem)

    def _wanted(self, num_questions: int, num_pairs: int) -> Tensor | None:
        return None if self.role is None else self.role.query_rows(num_questions, num_questions + num_pairs)

    def renaming(self, step: int) -> Renaming | None:
        """How facts are called in a step of the reader."""
        train = self.config.train
        if not self.streams.reads(step) or train.documents == "none" or train.rename == 0:
            return None
        return Renaming(self.values, seed=train.seed, step=step, fraction=train.rename)

    def __call__(self, step: int) -> QueryBatch:
        return self.batch(*self.samples(step), step)


@dataclass(frozen=True)
class QueriesInWorker:
    """Opens the data set in a worker; its counts of bad samples travel with the batches."""

    config: Config
    usable_pairs: Sequence[int]
    streams: Streams
    values: Mapping[str, Sequence[str]]
    role: Role | None

    def __call__(self) -> _Reporting:
        dataset = Dataset.of(self.config.data)
        return _Reporting(
            Queries(
                self.config, training_questions(dataset, mixed_datasets(self.config.data, dataset)),
                dataset.pairs("train"), usable_pairs=self.usable_pairs, streams=self.streams, values=self.values,
                role=self.role,
            )
        )  # fmt: skip


class _Reporting:
    def __init__(self, queries: Queries) -> None:
        self.queries = queries
        self._seen: list[Seen] = []
        for view in (queries.questions, queries.pairs):
            view.bad = _Recorder(view.name, self._seen)  # type: ignore[assignment]

    def __call__(self, step: int) -> QueryBatch:
        self._seen.clear()
        return dataclasses.replace(self.queries(step), seen=list(self._seen))


class _Recorder:
    """Takes the place of `data.bad_data.BadData` in a worker."""

    def __init__(self, name: str, seen: list[Seen]) -> None:
        self.name, self.seen = name, seen

    def record(self, position: int, problem: str | None, *, key: str, shard: Path) -> None:
        self.seen.append((self.name, position, problem, key, shard))


def count_seen(seen: Sequence[Seen], views: Sequence[Any]) -> None:
    """Put a worker's records into the counts of the views they belong to."""
    by_name = {view.name: view for view in views}
    for name, position, problem, key, shard in seen:
        by_name[name].bad.record(position, problem, key=key, shard=shard)


def joined(found: Iterable[Mapping[int, str]]) -> dict[int, str]:
    """What the ranks found to be broken, by row; of several reasons for a row, that of the lowest rank."""
    whole: dict[int, str] = {}
    for rows in found:
        whole = {**rows, **whole}
    return dict(sorted(whole.items()))


def step_pictures(
    config: Config,
    images: Sequence[bytes | None],
    names: Sequence[str],
    *,
    step: int,
    wanted: Tensor | None,
    broken: dict[int, str] | None = None,
) -> tuple[Tensor, Tensor]:
    """Pictures of a step (N, 3, S, S), augmented by name, and which exist (N,).

    Args:
        wanted: (N,) bool, rows to decode; the others are NaN. None: all.
        broken: is told the rows that cannot be decoded, and why. None: that is an error.
    """
    train, size = config.train, config.data.image_size
    has_image = torch.tensor([float(image is not None) for image in images])  # also where it was not read
    rows = list(range(len(images))) if wanted is None else wanted.nonzero().flatten().tolist()
    found: dict[int, str] = {}
    image, _ = pictures(
        [images[i] for i in rows], size, transform=config.data.image_transform,
        broken=None if broken is None else found,
    )  # fmt: skip
    image = augment(image, [names[i] for i in rows], seed=train.seed, step=step, strength=train.augment)
    if broken is not None:
        broken |= {rows[i]: reason for i, reason in found.items()}
    if len(rows) == len(images):
        return image, has_image
    whole = torch.full((len(images), 3, size, size), float("nan"))
    whole[rows] = image
    return whole, has_image


def without_pictures(
    config: Config,
    image_N3SS: Tensor,
    has_image_N: Tensor,
    names: Sequence[str],
    *,
    step: int,
    wanted: Tensor | None,
    broken: Mapping[int, str],
) -> tuple[Tensor, Tensor]:
    """What `step_pictures` would have given, had there been no pictures in the ``broken`` rows."""
    if not broken:
        return image_N3SS, has_image_N
    rows, image, has_image = sorted(broken), image_N3SS.clone(), has_image_N.clone()
    image[rows], has_image[rows] = step_pictures(
        config, [None] * len(rows), [names[row] for row in rows], step=step,
        wanted=None if wanted is None else wanted[rows],
    )  # fmt: skip
    return image, has_image


def _names(samples: Sequence[Sample], pairs: Sequence[Pair]) -> list[str]:
    return [f"query {s.id}" for s in samples] + [f"query {p.id}" for p in pairs]


def _texts(samples: Sequence[Sample], pairs: Sequence[Pair]) -> list[str]:
    return [s.question for s in samples] + [p.text for p in pairs]


def _filled(items: list[Item], slots: Slots) -> list[Item]:
    """Weight 0, and nothing to find, for what only fills up an epoch's last batch."""
    return [
        item if weight else dataclasses.replace(item, weight=0.0, gold=())
        for item, weight in zip(items, slots.weights.tolist(), strict=True)
    ]
