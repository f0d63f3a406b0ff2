"""The part of a training step that waits for no weights: its samples, what the towers take of them, its renaming.

All of it is a pure function of the step, so workers can compute it while the step before runs (`data.ahead`); with
or without them the numbers are the same. Documents are not in it: which are read depends on the weights that the
step before leaves behind.

Shapes: B questions, F pairs, Q = B + F queries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from data.announcing import Announcer
from data.cursor import Slots
from data.dataset import Dataset, PairSet, QuestionSet
from data.mixed_view import MixedView, mixed_datasets, training_questions
from data.samples import Pair, Sample
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
        seen: samples that a worker read for it, for the counts of bad ones (which count each once an epoch).
    """

    samples: list[Sample]
    pairs: list[Pair]
    features: dict[str, Tensor]
    renaming: Renaming | None
    seen: list[Seen] = field(default_factory=list)


class Queries:
    """Reads and prepares.

    Args:
        usable_pairs: positions of the pairs that may be used.
        values: of each field, for renaming.
        role: which pictures are decoded; None: all.
        featurizer: the encoder's own, whose counts go on; None: another.
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
        featurizer: Featurizer | None = None,
    ) -> None:
        self.config, self.questions, self.pairs = config, questions, pairs
        self.usable_pairs, self.streams, self.values, self.role = usable_pairs, streams, values, role
        self.featurizer = featurizer or Featurizer(config.retriever)
        self._announcers: dict[Name, Announcer] = {}

    def samples(self, step: int) -> tuple[list[Sample], list[Pair]]:
        """The questions and pairs of a step: a pure function of data, seed and step."""
        name: Name = "questions" if self.streams.reads(step) else "questions alone"
        self._announce(name, step)
        self._announce("pairs", step)
        asked, paired = self.streams.slots(name, step), self.streams.slots("pairs", step)
        samples = [] if asked is None else _filled(self.questions.read(asked.positions.tolist()), asked)
        if paired is None:
            return samples, []
        return samples, _filled(self.pairs.read([self.usable_pairs[i] for i in paired.positions.tolist()]), paired)

    def _announce(self, name: Name, step: int) -> None:
        """Windows that begin in this step's batch of a stream, to the file system; the present one at the start."""
        if not self.streams.flows(name, step) or name not in self.streams.batches:
            return
        number = self.streams.number(name, step)
        if name not in self._announcers:
            will_need = self._pairs_will_need if name == "pairs" else self.questions.will_need
            self._announcers[name] = Announcer(self.streams.batches[name], will_need, first=number)
        self._announcers[name].before(number)

    def _pairs_will_need(self, places: range) -> None:
        self.pairs.will_need(range(self.usable_pairs[places.start], self.usable_pairs[places.stop - 1] + 1))

    def features(self, samples: Sequence[Sample], pairs: Sequence[Pair], step: int) -> dict[str, Tensor]:
        """What the towers take of the Q queries."""
        images = [s.image for s in samples] + [p.image for p in pairs]
        names = [f"query {s.id}" for s in samples] + [f"query {p.id}" for p in pairs]
        wanted = None if self.role is None else self.role.query_rows(len(samples), len(images))
        image, has_image = step_pictures(self.config, images, names, step=step, wanted=wanted)
        texts = [s.question for s in samples] + [p.text for p in pairs]
        return self.featurizer(texts, image, has_image, side="query")

    def renaming(self, step: int) -> Renaming | None:
        """How facts are called in a step of the reader."""
        train = self.config.train
        if not self.streams.reads(step) or train.documents == "none" or train.rename == 0:
            return None
        return Renaming(self.values, seed=train.seed, step=step, fraction=train.rename)

    def __call__(self, step: int) -> QueryBatch:
        samples, pairs = self.samples(step)
        return QueryBatch(samples, pairs, self.features(samples, pairs, step), self.renaming(step))


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


def step_pictures(
    config: Config, images: Sequence[bytes | None], names: Sequence[str], *, step: int, wanted: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Pictures of a step (N, 3, S, S), augmented by name, and which exist (N,).

    Args:
        wanted: (N,) bool, rows to decode; the others are NaN. None: all.
    """
    train = config.train

    def decoded(rows: Sequence[int]) -> Tensor:
        image, _ = pictures([images[i] for i in rows], config.data.image_size, transform=config.data.image_transform)
        return augment(image, [names[i] for i in rows], seed=train.seed, step=step, strength=train.augment)

    has_image = torch.tensor([float(image is not None) for image in images])
    if wanted is None or bool(wanted.all()):
        return decoded(range(len(images))), has_image
    rows = wanted.nonzero().flatten()
    size = config.data.image_size
    whole = torch.full((len(images), 3, size, size), float("nan"))
    whole[rows] = decoded(rows.tolist())
    return whole, has_image


def _filled(items: list[Item], slots: Slots) -> list[Item]:
    """Weight 0, and nothing to find, for what only fills up an epoch's last batch."""
    return [
        item if weight else dataclasses.replace(item, weight=0.0, gold=())
        for item, weight in zip(items, slots.weights.tolist(), strict=True)
    ]
