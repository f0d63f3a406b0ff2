"""One training step, in the three phases that keep it exact under any cut.

1. *Retriever, forward*: the towers embed all queries of the global batch without graph; search; the unique
   documents are fetched and embedded once each. The contrastive loss, which mixes all rows, is computed here,
   on the whole batch, and leaves its gradients on the embeddings.
2. *Reader, pipelined*: embeddings enter as detached inputs; generation and distillation run per micro-batch
   over the stages; the gradients on the embeddings are summed over micro-batches, stages and replicas.
3. *Retriever, backward*: the towers run once more, with graph, each rank its share of the rows, and receive
   the sum of both gradients.

Every loss is a sum with one denominator counted over the global batch, so gradients are only ever added.

Shapes: B questions, F pairs, Q = B + F queries, U unique documents, k documents a question, E embedding width.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from data.ahead import Ahead
from data.dataset import Dataset, Pair, Sample, digest
from data.document_store import Document
from data.mixed_view import check_mixed, mixed_datasets, training_questions
from pipeline import BlockProgram, Pipeline, keyed
from rag_mm import objectives
from rag_mm.batch import Collator, training_answers
from rag_mm.config import Config
from rag_mm.memory import Memory
from rag_mm.mesh import Mesh
from rag_mm.prepared import Outcome, Prepared, replica_share
from rag_mm.queries import Queries, QueriesInWorker, QueryBatch, count_seen, step_pictures
from rag_mm.renaming import Renaming, field_values
from rag_mm.role import Role
from rag_mm.streams import Streams
from rag_mm.towers import Towers, embed_all
from rag_mm.vision_choice import Vision
from rag_mm.vision_grouped import VisionGrouped
from rag_mm.vision_once import VisionOnce
from retriever.embed import embed_documents

DRIFT_EVERY = 10  # steps


class BatchMismatchError(RuntimeError):
    """Ranks would have trained on different batches; says which."""


@dataclass(frozen=True)
class _Queries:
    features: dict[str, Tensor]
    embedding: Tensor


class JointStep:
    """Computes gradients; changes no weights.

    Attributes:
        asked: documents that training questions ask about (as a set; which question asks about which is not used).
        usable_pairs: positions of the pairs that the contrastive objective may see.
        values: values of each field over the asked documents, for renaming.
        streams: which samples a step takes.
        role: which pictures this rank decodes; None, before the reader is cut: all.
    """

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
        self.config, self.dataset, self.towers, self.encoder = config, dataset, towers, towers.encoder
        self.collator, self.memory, self.mesh = collator, memory, mesh
        mixed = mixed_datasets(config.data, dataset)
        self.questions, self.pairs = training_questions(dataset, mixed), dataset.pairs("train")
        self.asked = {name for one in mixed.values() or [dataset] for name in one.asked_documents()}
        asked = sorted(self.asked)
        self.usable_pairs = list(range(len(self.pairs)))
        if config.train.pairs == "unasked":
            self.usable_pairs = [i for i, pair in enumerate(self.pairs) if not self.asked & set(pair.gold)]
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
        self.reads, self.trains_retriever = self.streams.reads, self.streams.trains_retriever
        self._contrasts = self.streams.contrasts
        self.role: Role | None = None
        self._ahead: Ahead[QueryBatch] | None = None

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
        samples, pairs = self.samples(step)
        features = self._queries_of.features(samples, pairs, step)
        return QueryBatch(samples, pairs, features, self._queries_of.renaming(step))

    def _take(self, step: int) -> QueryBatch:
        """What a step begins with, from a worker where there are some, and the same on every rank."""
        if self._ahead is None:
            batch = self._taken(step)
        else:
            assert self._ahead.next == step, "workers read the steps in their order"
            batch = next(self._ahead)
            count_seen(batch.seen, (self.questions, self.pairs))
        self._check_same(step, batch)
        return batch

    def _check_same(self, step: int, batch: QueryBatch) -> None:
        """Stop, on every rank, if a rank has another batch (a small collective).

        Raises:
            BatchMismatchError: names the ranks.
        """
        described = [f"{s.id} {s.weight} {s.question} {s.answers}" for s in batch.samples]
        described += [f"{p.id} {p.weight} {p.text} {p.gold}" for p in batch.pairs]
        digests = self.mesh.gather(digest(described))
        others = [f"rank {rank}" for rank, theirs in enumerate(digests) if theirs != digests[0]]
        if others:
            raise BatchMismatchError(
                f"step {step + 1}: {', '.join(others)} read another batch than rank 0 ({', '.join(digests)}); nothing "
                f"was trained on it. All ranks must see the same files under {self.config.data.dir}"
            )

    def prepare(self, step: int) -> Prepared:
        """Phase 1 but for the contrastive loss: embed, search, fetch, embed; and the reader's batch."""
        started = time.perf_counter()
        taken = self._take(step)
        samples, queries = taken.samples, self._embedded(taken.features)
        ids: list[list[str]] = [[] for _ in samples]
        searched = torch.zeros(len(samples), 0)
        if self.reads(step):
            if self.config.train.documents == "retrieved":
                ids, searched = self.memory.search(queries.embedding[: len(samples)], k=self.config.retriever.k)
            elif self.config.train.documents == "gold":
                ids = [[sample.subject or self.memory.store.ids[0]] for sample in samples]
        retrieve_s = time.perf_counter() - started
        prepared = self._assemble(step, taken, queries, ids, reads=self.reads(step))
        prepared.retrieve_s = retrieve_s
        if prepared.reader and step - self.config.train.retriever_steps < self.config.train.distill_after:
            prepared.reader["distill_weight"] = torch.zeros(len(samples))
        if searched.numel() and step % DRIFT_EVERY == 0:
            prepared.drift = self._drift(queries.embedding[: len(samples)], ids, searched)
        return prepared

    def _drift(self, query_BE: Tensor, ids: list[list[str]], searched_Bk: Tensor) -> float:
        """How far the scores of what was found have moved since the index was made (pictures unchanged)."""
        read = sorted({name for names in ids for name in names})
        now_UE = embed_documents(
            self.encoder, self.memory.store, read, image_size=self.memory.image_size, batch_size=len(read),
            embed=self.towers.embed_share,
        )  # fmt: skip
        place = {name: i for i, name in enumerate(read)}
        now_BkE = now_UE[torch.tensor([[place[name] for name in names] for names in ids])]
        return (torch.einsum("be,bke->bk", query_BE, now_BkE) - searched_Bk).abs().mean().item()

    def example(self) -> Prepared:
        """The reader's first batch with arbitrary documents in place of retrieved ones: to trace and to prove on."""
        first = min(self.config.train.retriever_steps, self.config.train.steps - 1)
        taken = self._taken(first)
        samples = taken.samples
        asked, documents = sorted(self.asked) or self.memory.store.ids[:1000], self.config.train.documents
        k = {"retrieved": self.config.retriever.k, "gold": 1, "none": 0}[documents]
        ids = [[asked[(i * k + j) % len(asked)] for j in range(k)] for i in range(len(samples))]
        return self._assemble(first, taken, self._embedded(taken.features), ids, reads=True)

    def expected_reads(self, *, most: int = 20_000) -> Tensor:
        """Which document each pair of the reader's first batch would read (P,), with the retriever as it is.

        The numbers say only which are the same.

        Args:
            most: documents searched, evenly taken from a larger memory (which lets a little more be the same).
        """
        first = min(self.config.train.retriever_steps, self.config.train.steps - 1)
        if self.config.train.documents != "retrieved":
            prepared = self.example()
            return prepared.read if prepared.read.numel() else torch.zeros(len(prepared.samples), dtype=torch.int64)
        ids = self.memory.store.ids[:: -(-len(self.memory.store) // most)]
        part = embed_documents(
            self.encoder, self.memory.store, [ids[i] for i in self.towers.share(len(ids)).tolist()],
            image_size=self.memory.image_size, batch_size=self.memory.batch_size, embed=self.towers.embed_share,
        )  # fmt: skip
        score = self.probe(first) @ self.towers.join(part, len(ids)).T
        return score.topk(min(self.config.retriever.k, len(ids)), dim=1).indices.flatten()

    def probe(self, step: int) -> Tensor:
        """Embeddings (B, E) of the questions of a step: what old and new index versions are compared on."""
        samples, _ = self.samples(step)
        return self._embedded(self._queries_of.features(samples, [], step)).embedding

    def _assemble(
        self,
        step: int,
        taken: QueryBatch,
        queries: _Queries,
        ids: list[list[str]],
        *,
        reads: bool,
    ) -> Prepared:
        samples, pairs = taken.samples, taken.pairs
        gold = [self._labels(sample) for sample in samples] + [list(pair.gold) for pair in pairs]
        hard = [self._hard_negatives(sample) for sample in samples] + [list(pair.hard_negatives) for pair in pairs]
        contrasted = {self._one_of(names, step) for names in (*gold, *hard) if names and self._contrasts(step)}
        unique = sorted(contrasted.union(*ids))
        documents = self.memory.fetch(unique)
        place = {name: i for i, name in enumerate(unique)}
        read = torch.tensor([place[name] for names in ids for name in names], dtype=torch.int64)
        wanted = None if self.role is None else self.role.document_rows(len(unique), len(samples), read)
        images = [d.image for d in documents]
        image, has_image = step_pictures(self.config, images, unique, step=step, wanted=wanted)
        document = self.encoder.features([d.search_text for d in documents], image, has_image)
        positive = torch.zeros(len(gold), len(unique), dtype=torch.bool)
        for q, names in enumerate(gold):
            positive[q, [place[name] for name in names if name in place]] = True
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

    def _labels(self, sample: Sample) -> list[str]:
        return list(sample.gold) if self.config.objectives.contrastive_on != "pairs" else []

    def _hard_negatives(self, sample: Sample) -> list[str]:
        return list(sample.hard_negatives) if self.config.objectives.contrastive_on != "pairs" else []

    def _one_of(self, names: list[str], step: int) -> str:
        """One of several right (or of several misleading) documents, drawn by (seed, step, names)."""
        return names[keyed.seed_of("positive", self.config.train.seed, step, *names) % len(names)]

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

    def reader_inputs(self, prepared: Prepared, query_QE: Tensor, document_UE: Tensor) -> dict[str, Tensor]:
        """The reader's batch with the embeddings it scores: those of what it reads, or zeros (closed book)."""
        num = len(prepared.samples)
        if prepared.read.numel():
            document = document_UE[prepared.read]
        else:
            document = torch.zeros(num, query_QE.shape[1], dtype=query_QE.dtype)
        return {**prepared.reader, "query_embedding": query_QE[:num], "document_embedding": document}

    def contrastive(self, prepared: Prepared, query_QE: Tensor, document_UE: Tensor) -> Tensor:
        """The contrastive objective over the whole global batch, a scalar."""
        weight = prepared.contrastive_weight * self.config.objectives.contrastive
        return objectives.contrastive(query_QE, document_UE, prepared.positive, weight, self.encoder.scale()).sum()

    def gradients(self, prepared: Prepared, pipeline: Pipeline | None, vision: Vision | None = None) -> Outcome:
        """Phases 1 (loss), 2 and 3: leaves gradients in ``.grad``, summed over all ranks.

        Args:
            vision: where the pipeline's program is the reader with its pictures encoded grouped or once.

        Reader parameters of this rank's stage get the sum over replicas, the retriever's that over all ranks that
        embed rows for them.
        """
        train_retriever = self.trains_retriever(prepared.step)
        query_QE = prepared.query_embedding.clone().requires_grad_(train_retriever)
        document_UE = prepared.document_embedding.clone().requires_grad_(train_retriever)
        losses: dict[str, float] = {}
        outcome = Outcome(losses)
        leaves = [query_QE, document_UE, self.encoder.log_scale]
        if self._contrasts(prepared.step):
            loss = self.contrastive(prepared, query_QE, document_UE)
            losses["contrastive"] = loss.item()
            if self.mesh.is_first:  # computed alike everywhere, counted once
                loss.backward()
        if prepared.reader:
            assert pipeline is not None
            self._read(prepared, pipeline, vision, query_QE, document_UE, outcome)
        if train_retriever:
            total = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
            self.mesh.sum(total)
            self.towers.backward(prepared.query, total[0])
            self.towers.backward(prepared.document, total[1])
            self.encoder.log_scale.grad = total[2].clone()
        return outcome

    def _read(
        self,
        prepared: Prepared,
        pipeline: Pipeline,
        vision: Vision | None,
        query_QE: Tensor,
        document_UE: Tensor,
        outcome: Outcome,
    ) -> None:
        """Phase 2 on this replica's share of the questions; and 1 and 3 of the vision block, if it is taken out."""
        num = len(prepared.samples)
        batch = self.reader_inputs(prepared, query_QE, document_UE)
        if isinstance(vision, VisionOnce):
            image_N3SS, row_P = vision.images(prepared)
            patch_NnD = vision.embed(image_N3SS).requires_grad_()
            batch = vision.inputs(batch, patch_NnD, row_P)
        share = replica_share(batch, num, self.mesh.replica, self.mesh.num_replicas)
        if isinstance(vision, VisionGrouped):
            assert vision.num_microbatches % pipeline.num_microbatches == 0
            image_C3SS, picture_P = vision.pictures(prepared)
            own = replica_share({"pairs": picture_P}, num, self.mesh.replica, self.mesh.num_replicas)
            share = vision.inputs(share, image_C3SS, own["pairs"])
        result = pipeline.step(share, seed=self.config.train.seed, step=prepared.step)
        reader = [p.grad for p in pipeline.parameters_here.values() if p.grad is not None]
        self.mesh.sum(reader, group=self.mesh.replicas)
        if isinstance(vision, VisionOnce):
            grad_NnD = torch.zeros_like(patch_NnD) if patch_NnD.grad is None else patch_NnD.grad
            self.mesh.sum([grad_NnD])
            vision.backward(image_N3SS, grad_NnD)
        outputs = result.outputs_everywhere()
        sums = torch.cat([outputs["losses"].sum(0), outputs["statistics"].sum(0)]).double()
        self.mesh.sum([sums], group=self.mesh.replicas)
        names = self.config.objectives.reader_names
        outcome.losses.update(zip(names, sums[: len(names)].tolist(), strict=True))
        tokens, right, entropy = sums[len(names) :].tolist()
        outcome.accuracy = right / max(tokens, 1.0)
        outcome.score_entropy = entropy / num

    def reference(self, prepared: Prepared, program: BlockProgram | None) -> tuple[float, dict[str, Tensor]]:
        """The slow, obvious twin: one process, one graph, the whole batch. Loss and gradients by name.

        Uses the same weights and the same retrieved ids; touches no ``.grad``.
        """
        query_QE, document_UE = self.encoder(prepared.query), self.encoder(prepared.document)
        loss = torch.zeros(())
        if self._contrasts(prepared.step):
            loss = loss + self.contrastive(prepared, query_QE, document_UE)
        parameters: dict[str, Tensor] = {}
        if self.trains_retriever(prepared.step):
            parameters = {f"retriever.{n}": p for n, p in self.encoder.named_parameters() if p.requires_grad}
        if prepared.reader:
            assert program is not None
            parameters |= {f"reader.{n}": p for n, p in program.named_parameters_global().items() if p.requires_grad}
            with keyed.scope(seed=self.config.train.seed, step=prepared.step):
                outputs = program.run(self.reader_inputs(prepared, query_QE, document_UE))
            loss = loss + outputs["losses"].sum()
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        grads = {
            name: torch.zeros_like(p) if g is None else g
            for (name, p), g in zip(parameters.items(), found, strict=True)
        }
        return loss.item(), grads

    def data_digest(self, prepared: Prepared) -> str:
        """Hash of the question ids of the global batch."""
        return digest([sample.id for sample in prepared.samples])

    def retrieved_digest(self, prepared: Prepared) -> str | None:
        """Hash of the retrieved ids in order, None where nothing is retrieved."""
        return digest([name for names in prepared.ids for name in names]) if prepared.read.numel() else None

    def hit_at_k(self, prepared: Prepared) -> float | None:
        """Share of questions with a right document among those read, None where nothing is retrieved."""
        if self.config.train.documents != "retrieved" or not prepared.read.numel():
            return None
        rows = zip(prepared.samples, prepared.ids, strict=True)
        hits = [bool(set(sample.gold) & set(ids)) for sample, ids in rows if sample.weight]
        return sum(hits) / len(hits) if hits else None
