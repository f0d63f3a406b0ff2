"""The reader as a block program: fusion in decoder (Izacard and Grave, 2007.01282), with pictures.

Read it top to bottom: pictures become patches, tokens and patches become one context per (question,
document) pair, encoder layers run over pairs, decoder layers over answers that attend to all documents of
their question, and the head turns that into loss contributions. The same list is what the planner cuts.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import Tensor

from pipeline import Block, BlockProgram
from rag_mm.objectives import ObjectivesConfig
from rag_mm.reader.config import ReaderConfig
from rag_mm.reader.embedding import AnswerEmbedding, ContextEmbedding, TokenEmbedding, Vision
from rag_mm.reader.head import ANSWER_INPUTS, HEAD_INPUTS, LossHead, NextToken, Reading, Targets
from rag_mm.reader.layers import DecoderLayer, EncoderLayer, fuse, without_one
from rag_mm.reader.side_streams import SideStreams

PAIR_NAMES = (
    "document", "document_match", "document_image", "context_mask", "context_token", "document_embedding",
    "document_patches", "context",
)  # fmt: skip
INPUTS = (
    "sample_id", "question", "question_image", "document", "document_match", "document_image", "context_mask",
    "context_token", *HEAD_INPUTS,
)  # fmt: skip


class FidHead(LossHead):
    """Block module: encoded context and decoder streams to ``losses`` and ``statistics``."""

    def __init__(self, config: ReaderConfig, tokens: TokenEmbedding, objective: ObjectivesConfig) -> None:
        super().__init__(config, tokens, objective)
        self.num_layers = config.decoder_layers

    def forward(
        self,
        context_PLD: Tensor,
        mask_PL: Tensor,
        token_PL: Tensor,
        answer_in_BT: Tensor,
        target_BT: Tensor,
        target_weight_BT: Tensor,
        sample_weight_B: Tensor,
        distill_weight_B: Tensor,
        query_BE: Tensor,
        document_PE: Tensor,
        answer_BTD: Tensor,
        *side_streams: Tensor,
    ) -> tuple[Tensor, Tensor]:
        rows, side = answer_in_BT.shape[0], self.side.parts(side_streams)
        score_Bk = self.scores(query_BE, document_PE)
        prior = self.prior(score_Bk, mask_PL.shape[1])
        fused = Reading(answer_BTD, fuse(context_PLD, rows), fuse(mask_PL, rows), fuse(token_PL, rows), prior)
        alone = [Reading(states, context_PLD, mask_PL, token_PL) for states in side.single]
        without: list[Reading] = []
        if side.without is not None:
            # The prior of the others is the same but for a constant, which the pointer's softmax takes away.
            without = [
                replace(fused, answer_NTD=states_BTD, mask_NJ=mask_BJ)
                for states_BTD, mask_BJ in zip(
                    side.without.unflatten(0, (rows, -1)).unbind(1),
                    without_one(fused.mask_NJ, score_Bk.shape[1]).unbind(1),
                    strict=True,
                )
            ]
        targets = Targets(answer_in_BT, target_BT, target_weight_BT, sample_weight_B, distill_weight_B)
        attention = None if side.attention is None else side.attention / self.num_layers
        return self.outputs(
            fused, alone, targets, score_Bk, width=query_BE.shape[1], without=without, attention_PT=attention
        )


def fid_program(config: ReaderConfig, objective: ObjectivesConfig, *, vocabulary: int, image_size: int) -> BlockProgram:
    """Build the reader with fresh weights from torch's generator.

    Batch inputs (B samples, P = B*k pairs; see ``rag_mm.batch`` for how they are made): ``question`` (B, Q),
    ``question_image`` (B, 3, S, S), ``document`` and ``document_match`` (P, M), ``document_image`` (P, 3, S, S),
    ``context_mask`` and ``context_token`` (P, L), ``answer_in``, ``target`` and ``target_weight`` (B, T),
    ``sample_weight`` and ``distill_weight`` (B,), ``query_embedding`` (B, E), ``document_embedding`` (P, E),
    ``sample_id`` (B,).
    """
    side = SideStreams.of(objective)
    streams = ("answer", *side.names)
    tokens = TokenEmbedding(config, vocabulary=vocabulary)
    blocks = [
        Block(
            "vision", Vision(config, image_size=image_size),
            reads=("question_image", "document_image"), writes=("question_patches", "document_patches"),
        ),
        Block(
            "embed", ContextEmbedding(config, tokens),
            reads=("question", "document", "document_match", "question_patches", "document_patches"),
            writes=("context",),
        ),
        *(
            Block(f"encoder.{i}", EncoderLayer(config), reads=("context", "context_mask"), writes=("context",))
            for i in range(config.encoder_layers)
        ),
        Block(
            "answer", AnswerEmbedding(tokens, side=side),
            reads=("answer_in", "document"), writes=streams,
        ),
        *(
            Block(
                f"decoder.{i}", DecoderLayer(config, side=side),
                reads=("context", "context_mask", *streams), writes=streams,
            )
            for i in range(config.decoder_layers)
        ),
        Block(
            "head", FidHead(config, tokens, objective),
            reads=("context", "context_mask", "context_token", *HEAD_INPUTS, *streams),
            writes=("losses", "statistics"),
        ),
    ]  # fmt: skip
    pairs = (*PAIR_NAMES, *side.pairs)
    return BlockProgram(blocks, inputs=INPUTS, outputs=("losses", "statistics"), axes=dict.fromkeys(pairs, "pair"))


class FidNextToken(NextToken):
    """Block module: encoded context and answer stream to ``logits``."""

    def extend(
        self,
        cache: dict[str, Any],
        context_PLD: Tensor,
        mask_PL: Tensor,
        token_PL: Tensor,
        answer_in_BT: Tensor,
        query_BE: Tensor,
        document_PE: Tensor,
        answer_BTD: Tensor,
    ) -> Tensor:
        """New answer tokens (`pipeline.generate`): keys of the context are made once."""
        rows = answer_in_BT.shape[0]
        if not cache:
            prior = self.prior(self.scores(query_BE, document_PE), mask_PL.shape[1])
            context, mask, token = fuse(context_PLD, rows), fuse(mask_PL, rows), fuse(token_PL, rows)
            self.read(cache, Reading(answer_BTD, context, mask, token, prior))
        return self.following(cache, answer_in_BT, answer_BTD)

    def forward(self, *reads: Tensor) -> Tensor:
        return self.extend({}, *reads)


def fid_answering(program: BlockProgram) -> BlockProgram:
    """The same blocks without side streams, ending in ``logits`` instead of losses."""
    *body, last = program.blocks
    assert isinstance(last.module, FidHead)
    head = FidNextToken(last.module.pointer, last.module.log_prior_scale)
    reads = ("context", "context_mask", "context_token", *ANSWER_INPUTS, "answer")
    return answering(program, [*map(fused_only, body), Block(last.name, head, reads=reads, writes=("logits",))])


def fused_only(block: Block) -> Block:
    """A reader's block without side streams."""
    module = block.module
    side = getattr(module, "side", None)
    if not isinstance(side, SideStreams) or not side.names:
        return block
    module = copy.copy(module)  # with the same parameters
    module.side = SideStreams()
    reads, writes = (tuple(name for name in names if name not in side.names) for names in (block.reads, block.writes))
    return Block(block.name, module, reads=reads, writes=writes)


def answering(program: BlockProgram, blocks: list[Block]) -> BlockProgram:
    """A program of a reader's blocks that end in ``logits``, in evaluation mode."""
    read = {name for block in blocks for name in block.reads}
    return BlockProgram(
        blocks,
        inputs=tuple(name for name in program.inputs if name in read),
        outputs=("logits",),
        axes={name: axis for name, axis in program.axes.items() if name in read},
    ).eval()
