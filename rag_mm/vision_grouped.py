"""Pictures encoded once a micro-batch, inside the pipeline, however many of its samples read them.

The vision block is given the pictures of the *different* documents of each micro-batch, and a block behind it hands
every pair its patches; the gradients of a row that several pairs read add up. There is one forward, and nothing outside
of the pipeline; but a document that two micro-batches read is encoded in both: less is shared than by `VisionOnce`.
Shapes must not depend on the micro-batch: each has as many rows as the one that reads most, up to a bucket. Rows that
nobody reads repeat another and get no gradient.

Shapes: P pairs, M micro-batches, U rows of each, C pictures, N patches, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from pipeline import Block, BlockProgram
from rag_mm.batch import bucket
from rag_mm.prepared import Prepared
from rag_mm.vision_once import BLOCK, DOCUMENT

GATHER, IMAGE, ROW, PATCHES = "gather", "document_image", "document_row", "grouped_patches"
BUCKETS = 8  # sizes that U can have


class Gather(nn.Module):
    """Block module: patches of the different pictures (R, N, D) and each pair's row among them (P,) to (P, N, D).

    Rows count from the batch's first micro-batch on; modulo R that is right for one micro-batch's rows as well.
    """

    def forward(self, patches_RND: Tensor, row_P: Tensor) -> Tensor:
        return patches_RND[row_P % patches_RND.shape[0]]


class VisionGrouped:
    """A reader whose vision block encodes the different pictures of a micro-batch.

    Args:
        whole: the reader's program; the new one shares its modules, and its parameters have the same names.
        num_microbatches: M; a pipeline may run the batch in fewer that M is a multiple of, not in more.

    Attributes:
        program: with the vision block and the gather behind it.
        parameters: none that are outside of the pipeline.
    """

    def __init__(self, whole: BlockProgram, *, num_microbatches: int) -> None:
        first, *rest = whole.blocks
        assert first.name == BLOCK and first.writes[-1] == DOCUMENT
        self.whole, self.num_microbatches = whole, num_microbatches
        encode = replace(first, writes=(*first.writes[:-1], PATCHES))
        self.program = BlockProgram(
            [encode, Block(GATHER, Gather(), (PATCHES, ROW), (DOCUMENT,)), *rest],
            inputs=(*whole.inputs, ROW),
            outputs=whole.outputs,
            axes={**whole.axes, IMAGE: "microbatch", PATCHES: "microbatch", ROW: "pair"},
        ).train(whole.training)
        self.parameters: dict[str, nn.Parameter] = {}

    def of(self, whole: BlockProgram) -> VisionGrouped:
        """The same for another reader."""
        return VisionGrouped(whole, num_microbatches=self.num_microbatches)

    @staticmethod
    def pictures(prepared: Prepared) -> tuple[Tensor, Tensor]:
        """The global batch's pictures (C, 3, S, S), and for each pair its row among them (P,)."""
        if not prepared.read.numel():  # closed book: every pair has the same blank picture
            blank = prepared.reader[IMAGE]
            return blank[:1], torch.zeros(blank.shape[0], dtype=torch.int64)
        return prepared.document["image"], prepared.read

    def inputs(self, share: Mapping[str, Tensor], image_C3SS: Tensor, picture_P: Tensor) -> dict[str, Tensor]:
        """A replica's batch with the different pictures of each micro-batch in place of every pair's.

        Args:
            share: the replica's rows of the reader's batch.
            picture_P: which picture each of its pairs reads.
        """
        picture_R, row_P = different_rows(picture_P, num_microbatches=self.num_microbatches)
        return {**share, IMAGE: image_C3SS[picture_R], ROW: row_P}


def different_rows(read_P: Tensor, *, num_microbatches: int) -> tuple[Tensor, Tensor]:
    """What to encode for micro-batches of pairs that lie one after another, and where each pair finds it.

    Returns:
        The different values of each micro-batch (M*U,), its first one repeated up to U; and for each pair its row among
        all of them (P,).
    """
    parts = [part.unique(return_inverse=True) for part in read_P.view(num_microbatches, -1)]
    pairs = read_P.shape[0] // num_microbatches
    step = -(-pairs // BUCKETS)
    most = min(pairs, bucket(max(different.shape[0] for different, _ in parts), step))
    filled = [torch.cat([different, different[:1].expand(most - different.shape[0])]) for different, _ in parts]
    return torch.cat(filled), torch.cat([inverse + m * most for m, (_, inverse) in enumerate(parts)])
