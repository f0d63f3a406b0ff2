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

import torch
from torch import Tensor

from data.dataset import digest
from pipeline import BlockProgram, Pipeline, keyed
from rag_mm import losses
from rag_mm.preparation import Preparation
from rag_mm.prepared import Outcome, Prepared, replica_share
from rag_mm.reader.score_losses import statistic_names
from rag_mm.vision_choice import Vision
from rag_mm.vision_grouped import VisionGrouped
from rag_mm.vision_once import VisionOnce


class JointStep(Preparation):
    """Computes gradients; changes no weights."""

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
        return losses.contrastive(
            query_QE, document_UE, prepared.positive, weight, self.encoder.scale(),
            several=self.config.objectives.contrastive_several,
        ).sum()  # fmt: skip

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
        outcome = Outcome({})
        leaves = [query_QE, document_UE, self.encoder.log_scale]
        if self._contrasts(prepared.step):
            loss = self.contrastive(prepared, query_QE, document_UE)
            outcome.losses["contrastive"] = loss.item()
            with torch.no_grad():
                margin = losses.contrastive_margin(query_QE, document_UE, prepared.positive)
            if margin.numel():
                outcome.contrast = {"margin": margin.mean().item(), "accuracy": (margin > 0).float().mean().item()}
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
        seen = dict(zip(statistic_names(self.config.objectives), sums[len(names) :].tolist(), strict=True))
        outcome.accuracy = seen.pop("right") / max(seen.pop("tokens"), 1.0)
        outcome.score_entropy = seen.pop("entropy") / num
        outcome.score_margin = seen.pop("margin")
        outcome.entropies = seen

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
