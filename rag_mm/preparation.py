"""Phase 1 of a training step but for the contrastive loss: embed the queries, search, fetch, embed the documents.

What comes out (`rag_mm.prepared.Prepared`) is the same on every rank and says all that the other phases need, so that
they, and the slow twin, can run on it again.

Shapes: B questions, F pairs, Q = B + F queries, U unique documents, k documents a question, E embedding width.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from data.dataset import Dataset, Sample
from data.document import Document
from data.document_entries import damaged_document
from data.samples import forbidden_of
from pipeline import keyed
from rag_mm.batch import Collator, training_answers
from rag_mm.config import Config
from rag_mm.contrast import Contrast
from rag_mm.memory import Memory
from rag_mm.mesh import Mesh
from rag_mm.prepared import Prepared
from rag_mm.queries import QueryBatch, joined, step_pictures, without_pictures
from rag_mm.renaming import Renaming
from rag_mm.reranking import rerank
from rag_mm.towers import Towers, embed_all
from rag_mm.training_batches import TrainingBatches
from retriever.embed import embed_documents

DRIFT_EVERY = 10  # steps


@dataclass(frozen=True)
class _Queries:
    features: dict[str, Tensor]
    embedding: Tensor


class Preparation(TrainingBatches):
    """Turns the samples of a step into what is computed on; changes no weights."""

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        *,
        towers: Towers,
        collator: Collator,
        memory: Memory,
        mesh: Mesh,
    ) -> None:
        super().__init__(config, dataset, mesh=mesh)
        self.towers, self.encoder, self.collator, self.memory = towers, towers.encoder, collator, memory
        self.contrast = Contrast(config, memory, towers=towers, mesh=mesh)

    def prepare(self, step: int) -> Prepared:
        """Phase 1 but for the contrastive loss: embed, search, fetch, embed; and the reader's batch."""
        started = time.perf_counter()
        taken = self._take(step)
        samples, queries = taken.samples, self._embedded(taken.features)
        retriever = self.config.retriever
        version = self.memory.version if self.streams.searches(step) else None
        ids: list[list[str]] = [[] for _ in samples]
        searched = torch.zeros(len(samples), 0)
        if self.reads(step):
            if self.config.train.documents == "retrieved":
                ids, searched = self.memory.search(
                    queries.embedding[: len(samples)],
                    k=retriever.rerank or retriever.k,
                    forbidden=forbidden_of(samples),
                )
            elif self.config.train.documents == "gold":
                ids = [[sample.subject or self.memory.store.ids[0]] for sample in samples]
        retrieve_s, started = time.perf_counter() - started, time.perf_counter()
        if searched.numel() and retriever.rerank:
            query_BE = queries.embedding[: len(samples)]
            ids, searched = rerank(query_BE, (ids, searched), k=retriever.k, embed=self._embedded_now)
        rerank_s = time.perf_counter() - started
        prepared = self._assemble(step, taken, queries, ids, reads=self.reads(step))
        assert self.memory.version == version or version is None, "an index was taken up within a step"
        prepared.index_version, prepared.retrieve_s, prepared.rerank_s = version, retrieve_s, rerank_s
        if prepared.reader and step - self.config.train.retriever_steps < self.config.train.distill_after:
            prepared.reader["distill_weight"] = torch.zeros(len(samples))
        if searched.numel() and step % DRIFT_EVERY == 0:
            prepared.drift = self._drift(queries.embedding[: len(samples)], ids, searched)
        return prepared

    def _embedded_now(self, names: Sequence[str]) -> Tensor:
        """Current embeddings (len(names), E) of documents as the index holds them, on every rank, which share them."""
        part = embed_documents(
            self.encoder, self.memory.store, [names[i] for i in self.towers.share(len(names)).tolist()],
            image_size=self.memory.image_size, batch_size=self.memory.batch_size, embed=self.towers.embed_share,
        )  # fmt: skip
        return self.towers.join(part, len(names))

    def _drift(self, query_BE: Tensor, ids: list[list[str]], searched_Bk: Tensor) -> float:
        """How far the scores of what was found have moved since the index was made (pictures unchanged)."""
        read = sorted({name for names in ids for name in names})
        now_UE, place = self._embedded_now(read), {name: i for i, name in enumerate(read)}
        now_BkE = now_UE[torch.tensor([[place[name] for name in names] for names in ids])]
        return (torch.einsum("be,bke->bk", query_BE, now_BkE) - searched_Bk).abs().mean().item()

    @property
    def _exemplary(self) -> int:
        """The first step in which reader and retriever train, or if there is none, in which the reader does."""
        train = self.config.train
        first, last = train.retriever_moves
        return first if first < last else min(train.retriever_steps, train.steps - 1)

    def example(self) -> Prepared:
        """That step's batch with arbitrary documents in place of retrieved ones: to trace and to prove on."""
        first = self._exemplary
        taken = self._agreed(first, self._taken(first))
        if not taken.samples:  # the retriever trains alone, on pairs: the reader is cut all the same
            samples = [Sample("example", "?", ("?",), "name", "", "", ())] * self.config.train.batch_size
            taken = self._agreed(first, self._queries_of.batch(samples, [], first))
        samples = taken.samples
        asked, documents = sorted(self.asked) or self.memory.store.ids[:1000], self.config.train.documents
        k = {"retrieved": self.config.retriever.k, "gold": 1, "none": 0}[documents]
        ids = [[asked[(i * k + j) % len(asked)] for j in range(k)] for i in range(len(samples))]
        return self._assemble(first, taken, self._embedded(taken.features), ids, reads=True, mine=False)

    def expected_reads(self, *, most: int = 20_000) -> Tensor:
        """Which document each pair of the reader's first batch would read (P,), with the retriever as it is.

        The numbers say only which are the same.

        Args:
            most: documents searched, evenly taken from a larger memory (which lets a little more be the same).
        """
        first = self._exemplary
        if self.config.train.documents != "retrieved":
            prepared = self.example()
            return prepared.read if prepared.read.numel() else torch.zeros(len(prepared.samples), dtype=torch.int64)
        ids = self.memory.store.ids[:: -(-len(self.memory.store) // most)]
        score = self.probe(first) @ self._embedded_now(ids).T
        return score.topk(min(self.config.retriever.k, len(ids)), dim=1).indices.flatten()

    def probe(self, step: int) -> Tensor:
        """Embeddings (B, E) of a step's questions, or else pairs: what old and new index versions are compared on."""
        samples, pairs = self.samples(step)
        batch = self._queries_of.batch(samples, [] if samples else pairs, step)
        return self._embedded(self._agreed(step, batch).features).embedding

    def _assemble(
        self,
        step: int,
        taken: QueryBatch,
        queries: _Queries,
        ids: list[list[str]],
        *,
        reads: bool,
        mine: bool = True,
    ) -> Prepared:
        samples, pairs = taken.samples, taken.pairs
        gold = [self._labels(sample) for sample in samples] + [list(pair.gold) for pair in pairs]
        hard = [self._hard_negatives(sample) for sample in samples] + [list(pair.hard_negatives) for pair in pairs]
        joining: set[str] = set()
        if self._contrasts(step):
            names = [f"question {s.id}" for s in samples] + [f"pair {p.id}" for p in pairs]
            forbidden = [*(sample.forbidden for sample in samples), *(() for _ in pairs)]
            joining = self.contrast.documents(
                step, names, gold, hard, queries.embedding, forbidden=forbidden, mine=mine
            )
        unique = sorted(joining.union(*ids))
        place = {name: i for i, name in enumerate(unique)}
        read = torch.tensor([place[name] for names in ids for name in names], dtype=torch.int64)
        wanted = None if self.role is None else self.role.document_rows(len(unique), len(samples), read)
        pictures = None if wanted is None else set(itertools.compress(unique, wanted.tolist()))
        documents = self.memory.fetch(unique, pictures=pictures)
        images, broken = [d.image for d in documents], dict[int, str]()
        image, has_image = step_pictures(self.config, images, unique, step=step, wanted=wanted, broken=broken)
        documents, broken = self._agreed_documents(documents, broken)
        image, has_image = without_pictures(
            self.config, image, has_image, unique, step=step, wanted=wanted, broken=broken
        )
        document = self.encoder.features([d.search_text for d in documents], image, has_image, side="document")
        positive = torch.zeros(len(gold), len(unique), dtype=torch.bool)
        if self._contrasts(step):
            positive = self.contrast.positive(gold, unique, documents)
        counted = positive.any(1).float()
        prepared = Prepared(
            step=step,
            samples=samples,
            query=queries.features,
            document=document,
            query_embedding=queries.embedding,
            document_embedding=embed_all(self.towers, document),
            ids=ids,
            read=read,
            positive=positive,
            contrastive_weight=counted / counted.sum().clamp(min=1.0),
        )
        if reads:
            prepared.reader = self._reader_batch(prepared, documents, queries, taken.renaming)
        return prepared

    def _agreed_documents(
        self, documents: list[Document], broken: dict[int, str]
    ) -> tuple[list[Document], dict[int, str]]:
        """The documents without what is damaged on any rank, which is counted, and the rows without a picture for that.

        A small collective. A document whose text is damaged has no picture either.

        Args:
            broken: rows whose pictures this rank could not decode, and why.
        """
        damaged = {row: document.problem for row, document in enumerate(documents) if document.problem is not None}
        texts, pictures = map(joined, zip(*self.mesh.gather((damaged, broken)), strict=True))
        without = {**pictures, **texts}
        for row, problem in without.items():
            name = documents[row].id
            self.memory.store.condemn(name, problem)
            if row in texts:
                documents[row] = damaged_document(name, problem)
            else:
                documents[row] = replace(documents[row], image=None)
        return documents, without

    def _labels(self, sample: Sample) -> list[str]:
        return list(sample.gold) if self.config.objectives.contrastive_on != "pairs" else []

    def _hard_negatives(self, sample: Sample) -> list[str]:
        return list(sample.hard_negatives) if self.config.objectives.contrastive_on != "pairs" else []

    def _embedded(self, features: dict[str, Tensor]) -> _Queries:
        return _Queries(features, embed_all(self.towers, features))

    def _reader_batch(
        self, prepared: Prepared, documents: list[Document], queries: _Queries, renaming: Renaming | None
    ) -> dict[str, Tensor]:
        train, samples = self.config.train, prepared.samples
        question_image = (
            queries.features["image"][: len(samples)],
            queries.features["has_image"][: len(samples)],
        )
        if train.documents == "none":
            read = [[Document("", "", {})] for _ in samples]
            image = torch.ones_like(question_image[0])
            document_image = (image, torch.zeros(len(samples)))
        else:
            k = len(prepared.ids[0])
            flat = [documents[i] for i in prepared.read.tolist()]
            read = [flat[i * k : (i + 1) * k] for i in range(len(samples))]
            document_image = (
                prepared.document["image"][prepared.read],
                prepared.document["has_image"][prepared.read],
            )
        batch = self.collator.context(
            [s.question for s in samples], read, question_image, document_image, renaming=renaming
        )
        weight = torch.tensor([s.weight for s in samples])
        if self.role is None or self.role.answers:
            batch |= self.collator.answers(training_answers(samples, renaming), weight)
        batch["sample_id"] = torch.tensor([keyed.seed_of(s.id) % 2**62 for s in samples])
        return batch
