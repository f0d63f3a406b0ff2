"""What a training step begins with: its questions and pairs, read here or ahead of time, the same on every rank.

Which samples a step takes is decided by `rag_mm.streams`, what of them waits for no weights is computed by
`rag_mm.queries`; here both meet the data set: what may be used of it, and what must hold of it before training starts.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping

from data.ahead import Ahead
from data.dataset import Dataset, Pair, Sample, digest
from data.mixed_view import check_mixed, mixed_datasets, training_questions
from rag_mm.config import Config
from rag_mm.mesh import Mesh
from rag_mm.queries import Queries, QueriesInWorker, QueryBatch, count_seen, joined
from rag_mm.renaming import field_values
from rag_mm.role import Role
from rag_mm.streams import Streams


class BatchMismatchError(RuntimeError):
    """Ranks would have trained on different batches; says which."""


class TrainingBatches:
    """The global batches of a run.

    Attributes:
        questions, pairs: of the training split.
        asked: documents that training questions ask about (as a set; which question asks about which is not used).
        usable_pairs: positions of the pairs that the contrastive objective may see.
        values: values of each field over the asked documents, for renaming.
        streams: which samples a step takes.
        role: which pictures this rank decodes; None, before the reader is cut: all.
        truncated: query texts that the retriever's text tower got cut off so far.

    Raises:
        ValueError: if the data set does not fit the configuration.
    """

    def __init__(self, config: Config, dataset: Dataset, *, mesh: Mesh) -> None:
        self.config, self.dataset, self.mesh = config, dataset, mesh
        mixed = mixed_datasets(config.data, dataset)
        self.questions, self.pairs = training_questions(dataset, mixed), dataset.pairs("train")
        self.asked = {name for one in mixed.values() or [dataset] for name in one.asked_documents()}
        asked = sorted(self.asked)
        self.usable_pairs = list(range(len(self.pairs)))
        if config.train.pairs == "unasked":
            self.usable_pairs = [i for i, pair in enumerate(self.pairs.scan()) if self._is_usable(pair)]
        if config.objectives.contrastive > 0 and config.objectives.contrastive_on == "pairs" and not self.usable_pairs:
            raise ValueError(
                f"objectives.contrastive_on is 'pairs', but {config.data.dir} has no usable pair with train.pairs "
                f"{config.train.pairs!r}; use other pairs or set objectives.contrastive and train.retriever_share to 0"
            )
        dataset.check_documents()
        check_mixed(mixed, dataset)
        if config.train.documents == "gold":
            for one in mixed.values() or [dataset]:
                one.check_subjects()
        values = field_values(fields for fields in dataset.fields_of(asked if dataset.fields else []))
        self.values = values if values.keys() & set(dataset.fields) else {}  # passages cannot be renamed
        self.streams = Streams(
            config, fingerprint=dataset.fingerprint, num_questions=len(self.questions),
            num_pairs=len(self.usable_pairs),
            mixed={name: (one.fingerprint, len(one.questions("train"))) for name, one in mixed.items()},
        )  # fmt: skip
        if not self._has_right_documents(mixed):
            raise ValueError(
                f"objectives.contrastive is {config.objectives.contrastive}, but no question and no pair that it may "
                f"see names a right document ({', '.join(mixed) or config.data.dir}); train from answers alone with "
                "--objectives.contrastive 0 --train.retriever_share 0"
            )
        self.reads, self.trains_retriever = self.streams.reads, self.streams.trains_retriever
        self._contrasts = self.streams.contrasts
        self.role: Role | None = None
        self.truncated = 0
        self._ahead: Ahead[QueryBatch] | None = None

    def _is_usable(self, pair: Pair) -> bool:
        return self.config.train.pairs == "all" or not self.asked & set(pair.gold)

    def _has_right_documents(self, mixed: Mapping[str, Dataset]) -> bool:
        """Whether the contrastive objective, if a step has it, sees a right document; looks no further than the first.

        Of pairs and questions, what costs less is looked at first: pairs nearly always name one.
        """
        config = self.config
        on, steps = config.objectives.contrastive_on, config.train.steps
        if config.objectives.contrastive == 0 or not self.streams.moved_retriever(0, steps):
            return True
        if on != "questions" and any(pair.gold and self._is_usable(pair) for pair in self.pairs.scan()):
            return True
        return on != "pairs" and any(one.has_labels() for one in mixed.values() or [self.dataset])

    @functools.cached_property
    def _queries_of(self) -> Queries:
        return Queries(
            self.config, self.questions, self.pairs, usable_pairs=self.usable_pairs, streams=self.streams,
            values=self.values, role=self.role,
        )  # fmt: skip

    def take_role(self, role: Role) -> None:
        """From now on, prepare only the pictures that this rank computes with."""
        self.role = role
        self.__dict__.pop("_queries_of", None)

    @contextlib.contextmanager
    def reading_ahead(self, *, start: int) -> Iterator[None]:
        """Within it, ``data.workers`` processes read the steps from ``start`` on, which are prepared in their order."""
        opener = QueriesInWorker(self.config, self.usable_pairs, self.streams, self.values, self.role)
        ahead = Ahead(opener, start=start, stop=self.config.train.steps, num_workers=self.config.data.workers)
        self._ahead = ahead if self.config.data.workers else None
        try:
            yield
        finally:
            self._ahead = None
            ahead.close()

    def samples(self, step: int) -> tuple[list[Sample], list[Pair]]:
        """The questions and pairs of global batch ``step``: a pure function of data, seed and step."""
        return self._queries_of.samples(step)

    def _taken(self, step: int) -> QueryBatch:
        """What a step begins with, made here."""
        return self._queries_of.batch(*self.samples(step), step)

    def _take(self, step: int) -> QueryBatch:
        """What a step begins with, from a worker where there are some, and the same on every rank."""
        if self._ahead is None:
            batch = self._taken(step)
        else:
            assert self._ahead.next == step, "workers read the steps in their order"
            batch = next(self._ahead)
            count_seen(batch.seen, (self.questions, self.pairs))
        self.truncated += batch.truncated
        return self._agreed(step, batch)

    def _agreed(self, step: int, batch: QueryBatch) -> QueryBatch:
        """The batch without what is broken on any rank; stops, on every rank, if a rank has another batch.

        A small collective: a digest of each rank's batch, and the rows whose pictures the rank could not decode.

        Raises:
            BatchMismatchError: names the ranks.
        """
        described = [
            f"{s.id} {s.weight} {s.question} {s.answers} {s.gold} {s.hard_negatives} {s.forbidden}"
            for s in batch.samples
        ]
        described += [f"{p.id} {p.weight} {p.text} {p.gold} {p.hard_negatives}" for p in batch.pairs]
        digests, found = zip(*self.mesh.gather((digest(described), batch.broken)), strict=True)
        others = [f"rank {rank}" for rank, theirs in enumerate(digests) if theirs != digests[0]]
        if others:
            raise BatchMismatchError(
                f"step {step + 1}: {', '.join(others)} read another batch than rank 0 ({', '.join(digests)}); nothing "
                f"was trained on it. All ranks must see the same files under {self.config.data.dir}"
            )
        return self._mended(step, batch, joined(found))

    def _mended(self, step: int, batch: QueryBatch, broken: Mapping[int, str]) -> QueryBatch:
        """The batch without what is broken, which is counted."""
        self._queries_of.condemn(step, broken)
        return self._queries_of.mended(batch, step, broken)
