"""Pictures encoded once a step, however many samples read them.

In the reader's program the vision block encodes a document's picture for every (question, document) pair, so
a document that eight samples read is encoded eight times. Its rows depend on the picture alone, so the block
can be taken out (hoisted): every rank encodes its share of the *different* pictures without graph, patches
enter the pipeline as batch inputs, and when their gradients are known the rows run once more, with graph.
That costs a second forward and no bubble (`rag_mm.vision_choice` says when it is worth that).

Shapes: B questions, P pairs, U documents that are read, N patches, D width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pipeline import BlockProgram
from rag_mm.mesh import Mesh
from rag_mm.prepared import Prepared
from rag_mm.reader.embedding import Vision

BLOCK, QUESTION, DOCUMENT = "vision", "question_patches", "document_patches"


class _Encoder(nn.Module):
    def __init__(self, vision: Vision) -> None:
        super().__init__()
        self.vision = vision

    def forward(self, image_N3SS: Tensor) -> Tensor:
        return self.vision.encode(image_N3SS)


class VisionOnce:
    """A reader whose vision block runs outside the pipeline.

    Args:
        whole: the reader's program; the new one shares its modules.

    Attributes:
        program: the reader without that block; patches are batch inputs.
        parameters: the block's own, by their names in the whole program; every rank holds them.
    """

    def __init__(self, whole: BlockProgram, mesh: Mesh) -> None:
        first, *rest = whole.blocks
        assert first.name == BLOCK and isinstance(first.module, Vision)
        self.whole, self.mesh, self._vision = whole, mesh, first.module
        read = {name for block in rest for name in block.reads}
        inputs = [name for name in whole.inputs if name in read or name == "sample_id"]
        known = {*inputs, QUESTION, DOCUMENT, *(name for block in rest for name in block.writes)}
        self.program = BlockProgram(
            rest,
            inputs=(*inputs, QUESTION, DOCUMENT),
            outputs=whole.outputs,
            axes={name: axis for name, axis in whole.axes.items() if name in known},
        ).train(whole.training)
        self.parameters: dict[str, nn.Parameter] = whole.block_parameters(BLOCK)

    def of(self, whole: BlockProgram) -> VisionOnce:
        """The same for another reader."""
        return VisionOnce(whole, self.mesh)

    def images(self, prepared: Prepared) -> tuple[Tensor, Tensor]:
        """The different pictures of a batch (B + U, 3, S, S), and for each pair its row among the U (P,)."""
        questions = prepared.reader["question_image"]
        if not prepared.read.numel():  # closed book: every pair has the same blank picture
            blank = prepared.reader["document_image"]
            return torch.cat([questions, blank[:1]]), torch.zeros(blank.shape[0], dtype=torch.int64)
        read, row_P = prepared.read.unique(return_inverse=True)
        return torch.cat([questions, prepared.document["image"][read]]), row_P

    def encoder(self) -> nn.Module:
        """Pictures (N, 3, S, S) to patches (N, patches, D), with the block's own parameters."""
        return _Encoder(self._vision)

    @torch.no_grad()
    def embed(self, image_N3SS: Tensor) -> Tensor:
        """Patches (N, patches, D) of all pictures, rows dealt out over the ranks."""
        part = self._vision.encode(image_N3SS[self.mesh.rows(image_N3SS.shape[0])])
        return self.mesh.join_rows(part, image_N3SS.shape[0])

    def backward(self, image_N3SS: Tensor, grad_NnD: Tensor) -> None:
        """Add to ``.grad`` what gradients on all patches give, summed over the ranks."""
        mine = self.mesh.rows(image_N3SS.shape[0])
        with self.mesh.summed_gradients(p for p in self.parameters.values() if p.requires_grad):
            if mine.numel():
                torch.autograd.backward(self._vision.encode(image_N3SS[mine]), grad_NnD[mine])

    def inputs(self, batch: Mapping[str, Tensor], patch_NnD: Tensor, row_P: Tensor) -> dict[str, Tensor]:
        """The reader's batch with patches in place of pictures; gradients reach ``patch_NnD``."""
        num = batch["question"].shape[0]
        given = {name: tensor for name, tensor in batch.items() if name in self.program.inputs}
        return {**given, QUESTION: patch_NnD[:num], DOCUMENT: patch_NnD[num:][row_P]}
