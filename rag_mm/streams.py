"""Which samples a training step takes: three streams, and how far each has been consumed.

Questions for the reader, questions while the retriever trains alone, and image-text pairs are shuffled apart, each
with epochs of its own (`data.order`). What a step takes is a pure function of data, seed and step; a checkpoint keeps
a cursor of each stream. Where a resumed run has other phases (``train.steps`` was changed), streams go on from
their cursors, so that no sample of an epoch is skipped or seen twice for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

from data.cursor import Batches, Cursor, Slots, Stream
from data.mixture import Mixture, shares
from data.order import Order
from pipeline import keyed
from rag_mm.config import Config

Name = Literal["questions", "questions alone", "pairs"]


class Streams:
    """The streams of a run and the phases that decide when they flow.

    Args:
        fingerprint: of the data.
        num_questions, num_pairs: samples of the training split that may be used.
        mixed: of each data set that ``data.mixture`` names, its fingerprint and number of questions.

    Attributes:
        batches: of each stream that has samples.
    """

    def __init__(
        self,
        config: Config,
        *,
        fingerprint: str,
        num_questions: int,
        num_pairs: int,
        mixed: Mapping[str, tuple[str, int]] | None = None,
    ) -> None:
        self.config = config
        train, data = config.train, config.data
        sizes: dict[Name, tuple[int, int]] = {
            "questions": (num_questions, train.batch_size),
            "questions alone": (num_questions, train.retriever_batch_size),
            "pairs": (num_pairs, train.pair_batch_size),
        }
        self.batches: dict[Name, Batches] = {}
        for name, (num_samples, batch_size) in sizes.items():
            if num_samples and batch_size:
                seed = keyed.seed_of(name, train.seed)
                how = {"chunk": data.shuffle_chunk, "window": data.shuffle_window}
                source: Stream = Order(num_samples, fingerprint, seed, **how)
                if mixed and name != "pairs":
                    parts = shares(data.mixture)
                    seeds = [keyed.seed_of(name, train.seed, i) for i in range(len(parts))]  # a copy is no echo
                    orders = tuple(
                        Order(mixed[folder][1], mixed[folder][0], source_seed, **how)
                        for folder, source_seed in zip(parts, seeds, strict=True)
                    )
                    source = Mixture(orders, tuple(parts.values()))
                self.batches[name] = Batches(source, batch_size, data.tail)
        self._origin: dict[Name, tuple[int, int]] = dict.fromkeys(sizes, (0, 0))  # a step, and its batch

    def reads(self, step: int) -> bool:
        """Whether the reader takes part in a step."""
        return step >= self.config.train.retriever_steps

    def trains_retriever(self, step: int) -> bool:
        """Whether the retriever's weights may move in a step; if not, nothing is computed for them."""
        train = self.config.train
        if not self.reads(step):
            return True
        first, last = train.retriever_moves
        return first <= step < last and train.joint_retriever_scale > 0 and train.documents != "none"

    def moved_retriever(self, since: int, step: int) -> bool:
        """Whether a step from ``since`` on and before ``step`` may have moved the retriever's weights."""
        return any(self.trains_retriever(start) for start, _ in self._phases(since, step))

    def searches(self, step: int) -> bool:
        """Whether a step searches the index: for the reader's documents, or for negatives."""
        reads = self.reads(step) and self.config.train.documents == "retrieved"
        return reads or (self.contrasts(step) and self.config.objectives.contrastive_mined_negatives > 0)

    def _phases(self, since: int, step: int) -> list[tuple[int, int]]:
        """The steps from ``since`` up to ``step`` in parts (start, stop) of which each takes the same streams."""
        train = self.config.train
        inner = {joint for joint in (train.retriever_steps, *train.retriever_moves) if since < joint < step}
        return list(pairwise(sorted({since, step, *inner})))

    def contrasts(self, step: int) -> bool:
        """Whether the contrastive objective takes part in a step."""
        return self.config.objectives.contrastive > 0 and self.trains_retriever(step)

    def flows(self, name: Name, step: int) -> bool:
        """Whether a step takes a batch of a stream."""
        on = self.config.objectives.contrastive_on
        if name == "questions":
            return self.reads(step)
        if name == "questions alone":
            return not self.reads(step) and on != "pairs"  # else their labels are not looked at
        return self.contrasts(step) and on != "questions" and "pairs" in self.batches

    def number(self, name: Name, step: int) -> int:
        """How many batches of a stream the steps before ``step`` took: the number of the next one."""
        since, number = self._origin[name]
        assert step >= since, "a run does not go back behind its checkpoint"
        return number + sum(stop - start for start, stop in self._phases(since, step) if self.flows(name, start))

    def epoch(self, name: Name, step: int) -> int:
        """How many epochs of a stream are over when ``step`` begins."""
        if name not in self.batches:
            return 0
        batches = self.batches[name]
        return batches.place(self.number(name, step)) // batches.source.num_samples

    def begun(self, name: Name, step: int) -> list[int]:
        """Positions that the steps before ``step`` took of the epoch of a stream that is not over."""
        batches = self.batches[name]
        place = batches.place(self.number(name, step))
        return batches.source.stream(place - place % batches.source.num_samples, place).tolist()

    def slots(self, name: Name, step: int) -> Slots | None:
        """The places of the batch of a stream that a step takes, None if it takes none.

        Raises:
            ValueError: if there are no samples.
        """
        if not self.flows(name, step):
            return None
        if name not in self.batches:
            raise ValueError(f"{self.config.data.dir} has no training questions, and this run trains on them")
        return self.batches[name].at(self.number(name, step))

    def cursors(self, step: int) -> dict[str, Any]:
        """What the first ``step`` steps consumed of each stream, for a checkpoint."""
        return {name: batches.consumed(self.number(name, step)).to_json() for name, batches in self.batches.items()}

    def go_on(self, step: int, cursors: Mapping[str, Any]) -> None:
        """Go on at ``step`` from the cursors of a checkpoint.

        Raises:
            ValueError: if a stream is not the one that a cursor was taken of.
        """
        origin: dict[Name, tuple[int, int]] = {}
        for name, batches in self.batches.items():
            if name not in cursors:
                raise ValueError(f"the checkpoint says nothing of the stream {name!r}; it has {', '.join(cursors)}")
            origin[name] = (step, batches.go_on(Cursor.from_json(cursors[name])))
        self._origin |= origin
