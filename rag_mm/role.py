"""Which pictures of a global batch a rank computes with, so that it reads, decodes, augments and embeds no others.

Every rank sees every sample's text and ids, which are small and decide shapes. A rank needs the pictures of the rows
that its towers embed, and those that the reader's stages on it read; all ranks' towers together embed all rows, so what
is broken is found by one of them (`rag_mm.training_batches`). The rest of a picture tensor is NaN there, not white: who
reads what is not there gets no number, and the gradient's norm says so.

Shapes: B questions, Q queries (questions, then pairs), U documents, P = B*k pairs that are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline import Pipeline
from rag_mm.mesh import Mesh
from rag_mm.towers import DealtTowers, Towers
from rag_mm.vision_once import VisionOnce

QUESTION, DOCUMENT = "question_image", "document_image"
ANSWERS = ("answer_in", "target", "target_weight", "sample_weight", "distill_weight")


@dataclass(frozen=True)
class Role:
    """A rank's part.

    Attributes:
        towers: rows that its towers embed, as (first, every so many).
        questions, documents: which replica's pictures its stages read, as (replica, replicas); None: none.
        once: where pictures are encoded outside the pipeline, which of them here, as (rank, ranks); None: they are not.
        answers: whether its stages read the answers.
        on_one_machine: whether all ranks are, so that each picture is read by some process of this machine.
    """

    towers: tuple[int, int]
    questions: tuple[int, int] | None
    documents: tuple[int, int] | None
    once: tuple[int, int] | None
    answers: bool
    on_one_machine: bool = True

    @classmethod
    def of(cls, mesh: Mesh, towers: Towers, pipeline: Pipeline, vision: object) -> Role:
        """The part of this rank, once the reader is cut.

        Args:
            vision: how its pictures are encoded; None: for every pair, in the pipeline.
        """
        replica, reads = (mesh.replica, mesh.num_replicas), pipeline.inputs_here
        return cls(
            towers=(mesh.rank, mesh.size) if isinstance(towers, DealtTowers) else replica,
            questions=replica if QUESTION in reads else None,
            documents=replica if DOCUMENT in reads else None,
            once=(mesh.rank, mesh.size) if isinstance(vision, VisionOnce) else None,
            answers=not set(ANSWERS).isdisjoint(reads),
            on_one_machine=mesh.on_one_machine,
        )

    def query_rows(self, num_questions: int, num_queries: int) -> Tensor:
        """Which of the queries' pictures are needed (Q,) bool."""
        wanted = torch.zeros(num_queries, dtype=torch.bool)
        wanted[self.towers[0] :: self.towers[1]] = True
        _share(wanted[:num_questions], self.questions)
        if self.once is not None:
            wanted[:num_questions][self.once[0] :: self.once[1]] = True
        return wanted

    def document_rows(self, num_documents: int, num_questions: int, read_P: Tensor) -> Tensor:
        """Which of the documents' pictures are needed (U,) bool.

        Args:
            read_P: rows of the documents that are read, the replicas' one after another.
        """
        wanted = torch.zeros(num_documents, dtype=torch.bool)
        wanted[self.towers[0] :: self.towers[1]] = True
        if self.documents is not None:
            share = torch.zeros(read_P.shape[0], dtype=torch.bool)
            _share(share, self.documents)
            wanted[read_P[share]] = True
        if self.once is not None:  # in the order of `VisionOnce.images`: questions, then documents that are read
            different = read_P.unique()
            wanted[different[(self.once[0] - num_questions) % self.once[1] :: self.once[1]]] = True
        return wanted


def _share(rows: Tensor, part: tuple[int, int] | None) -> None:
    """Mark a replica's share of ``rows``."""
    if part is not None:
        size = rows.shape[0] // part[1]
        rows[part[0] * size : (part[0] + 1) * size] = True
