"""The reader as a block program: a causal decoder with the documents in front of the question.

Against fid: one stack of layers and no encoder, and a sequence holds all documents of its question, so a document
is read in the light of those before it, and attention costs the square of their number. The question comes after
the documents; what it asks for reaches them by the mark on words they share (`TokenEmbedding`, `document_match`).
The stack is ``encoder_layers + decoder_layers`` deep: as deep as fid's way from a document to the answer.

Shapes: see `rag_mm.reader.sequence`; E embedding width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipeline import Block, BlockProgram
from pipeline.keyed import KeyedDropout
from rag_mm.objectives import ObjectivesConfig
from rag_mm.reader.config import ReaderConfig
from rag_mm.reader.embedding import TokenEmbedding, Vision
from rag_mm.reader.fid import INPUTS, answering, fused_only
from rag_mm.reader.head import ANSWER_INPUTS, HEAD_INPUTS, LossHead, NextToken, Reading, Targets
from rag_mm.reader.pointer import PointerHead
from rag_mm.reader.sequence import CausalLayer, Layout
from rag_mm.reader.side_streams import SideStreams, others

PAIR_NAMES = (
    "document", "document_match", "document_image", "context_mask", "context_token", "document_embedding",
    "document_patches",
)  # fmt: skip


class SequenceEmbedding(nn.Module):
    """Block module: question, documents, their patches and the answer so far to ``sequence_BSD`` and side streams.

    A side stream (`rag_mm.reader.side_streams`) has neither graph nor dropout, unless it trains the reader too.
    """

    def __init__(self, config: ReaderConfig, tokens: TokenEmbedding, *, side: SideStreams | None = None) -> None:
        super().__init__()
        self.tokens, self.side = tokens, side or SideStreams()
        self.kind = nn.Parameter(torch.randn(5, config.width) * 0.02)
        self.match = nn.Parameter(torch.randn(config.width))
        self.dropout = KeyedDropout(config.dropout)

    def context(
        self,
        question_BQ: Tensor,
        document_PM: Tensor,
        match_PM: Tensor,
        question_patches_BND: Tensor,
        document_patches_PND: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Documents (P, patches + M, D) and questions (B, patches + Q, D)."""
        text = self.tokens(document_PM, match_PM.unsqueeze(-1) * self.match)
        documents = torch.cat([document_patches_PND + self.kind[0], text + self.kind[1]], dim=1)
        asked = self.tokens(question_BQ)
        return documents, torch.cat([question_patches_BND + self.kind[2], asked + self.kind[3]], dim=1)

    def forward(
        self,
        question_BQ: Tensor,
        document_PM: Tensor,
        match_PM: Tensor,
        question_patches_BND: Tensor,
        document_patches_PND: Tensor,
        answer_BT: Tensor,
    ) -> tuple[Tensor, ...]:
        documents, question = self.context(
            question_BQ, document_PM, match_PM, question_patches_BND, document_patches_PND
        )
        asked = torch.cat([question, self.tokens(answer_BT) + self.kind[4]], dim=1)
        sequence = self.dropout(Layout.fused(documents, asked))
        streams = [sequence]
        if self.side.single:
            alone = Layout.alone(documents, asked)
            streams += [self.dropout(alone) if trained else alone.detach() for trained in self.side.trained]
        if self.side.without:
            streams.append(Layout.without(documents.detach(), asked.detach()))
        return tuple(streams)

    def extend(
        self,
        cache: dict[str, Any],
        question_BQ: Tensor,
        document_PM: Tensor,
        match_PM: Tensor,
        question_patches_BND: Tensor,
        document_patches_PND: Tensor,
        answer_BT: Tensor,
    ) -> tuple[Tensor]:
        """The whole sequence at first, then new answer tokens (`pipeline.generate`)."""
        first = not cache
        answer = self.tokens.extend(cache, answer_BT) + self.kind[4]
        if not first:
            return (answer,)
        documents, question = self.context(
            question_BQ, document_PM, match_PM, question_patches_BND, document_patches_PND
        )
        return (Layout.fused(documents, torch.cat([question, answer], dim=1)),)


class PrependHead(LossHead):
    """Block module: streams to ``losses`` and ``statistics``."""

    def __init__(
        self, config: ReaderConfig, tokens: TokenEmbedding, objective: ObjectivesConfig, layout: Layout
    ) -> None:
        super().__init__(config, tokens, objective)
        self.layout = layout

    def forward(
        self,
        question_BQ: Tensor,
        mask_PL: Tensor,
        token_PL: Tensor,
        answer_in_BT: Tensor,
        target_BT: Tensor,
        target_weight_BT: Tensor,
        sample_weight_B: Tensor,
        distill_weight_B: Tensor,
        query_BE: Tensor,
        document_PE: Tensor,
        sequence_BSD: Tensor,
        *side_streams: Tensor,
    ) -> tuple[Tensor, Tensor]:
        mask, token = self.layout.parts(mask_PL, question_BQ), self.layout.parts(token_PL, question_BQ)
        score_Bk, side = self.scores(query_BE, document_PE), self.side.parts(side_streams)
        prior_BJ = _prior(self.prior(score_Bk, mask[0].shape[1]), mask[1])
        fused = _reading(sequence_BSD, self.layout.fused(*mask), self.layout.fused(*token), prior_BJ)
        mask_PJ, token_PJ = self.layout.alone(*mask), self.layout.alone(*token)
        alone = [_reading(states, mask_PJ, token_PJ, None) for states in side.single]
        without: list[Reading] = []
        if side.without is not None:
            k, mask_PJ, token_PJ = score_Bk.shape[1], self.layout.without(*mask), self.layout.without(*token)
            for j, chosen in enumerate(others(k).to(score_Bk.device)):
                prior_BJ = _prior(self.prior(score_Bk[:, chosen], mask[0].shape[1]), mask[1])
                without.append(_reading(side.without[j::k], mask_PJ[j::k], token_PJ[j::k], prior_BJ))
        targets = Targets(answer_in_BT, target_BT, target_weight_BT, sample_weight_B, distill_weight_B)
        return self.outputs(fused, alone, targets, score_Bk, width=query_BE.shape[1], without=without)


def _prior(documents_BI: Tensor | None, question_BH: Tensor) -> Tensor | None:
    """Log-probability at every context position (B, J): its document's, and 0 in the question, which is in all."""
    if documents_BI is None:
        return None
    return torch.cat([documents_BI, documents_BI.new_zeros(question_BH.shape)], dim=1)


def _reading(sequence_NSD: Tensor, mask_NJ: Tensor, token_NJ: Tensor, prior_NJ: Tensor | None) -> Reading:
    length = mask_NJ.shape[1]
    return Reading(sequence_NSD[:, length:], sequence_NSD[:, :length], mask_NJ, token_NJ, prior_NJ)


def prepend_program(
    config: ReaderConfig, objective: ObjectivesConfig, *, vocabulary: int, image_size: int
) -> BlockProgram:
    """Build the reader with fresh weights from torch's generator; its batch inputs are those of `fid_program`."""
    side = SideStreams.of(objective)
    if side.attention:
        raise ValueError(
            "objectives.adist asks how a decoder attends to encoded documents, but with reader.fusion 'prepend' there "
            "is no such attention; use reader.fusion fid, or pdist or loop in place of adist"
        )
    streams = ("sequence", *side.names)
    tokens, layout = TokenEmbedding(config, vocabulary=vocabulary), Layout((image_size // config.patch) ** 2)
    blocks = [
        Block(
            "vision", Vision(config, image_size=image_size),
            reads=("question_image", "document_image"), writes=("question_patches", "document_patches"),
        ),
        Block(
            "embed", SequenceEmbedding(config, tokens, side=side),
            reads=(
                "question", "document", "document_match", "question_patches", "document_patches", "answer_in",
            ),
            writes=streams,
        ),
        *(
            Block(
                f"layer.{i}", CausalLayer(config, layout, side=side),
                reads=("sequence", "question", "context_mask", *streams[1:]), writes=streams,
            )
            for i in range(config.encoder_layers + config.decoder_layers)
        ),
        Block(
            "head", PrependHead(config, tokens, objective, layout),
            reads=("question", "context_mask", "context_token", *HEAD_INPUTS, *streams),
            writes=("losses", "statistics"),
        ),
    ]  # fmt: skip
    pairs = (*PAIR_NAMES, *side.pairs)
    return BlockProgram(blocks, inputs=INPUTS, outputs=("losses", "statistics"), axes=dict.fromkeys(pairs, "pair"))


class PrependNextToken(NextToken):
    """Block module: the sequence to ``logits``."""

    def __init__(self, pointer: PointerHead, log_prior_scale: nn.Parameter | None, layout: Layout) -> None:
        super().__init__(pointer, log_prior_scale)
        self.layout = layout

    def extend(
        self,
        cache: dict[str, Any],
        question_BQ: Tensor,
        mask_PL: Tensor,
        token_PL: Tensor,
        answer_in_BT: Tensor,
        query_BE: Tensor,
        document_PE: Tensor,
        sequence_BSD: Tensor,
    ) -> Tensor:
        """The whole sequence at first, then what is new of the answer (`pipeline.generate`)."""
        answer_BTD = sequence_BSD
        if not cache:
            mask, token = self.layout.parts(mask_PL, question_BQ), self.layout.parts(token_PL, question_BQ)
            prior = _prior(self.prior(self.scores(query_BE, document_PE), mask[0].shape[1]), mask[1])
            reading = _reading(sequence_BSD, self.layout.fused(*mask), self.layout.fused(*token), prior)
            self.read(cache, reading)
            answer_BTD = reading.answer_NTD
        return self.following(cache, answer_in_BT, answer_BTD)

    def forward(self, *reads: Tensor) -> Tensor:
        return self.extend({}, *reads)


def prepend_answering(program: BlockProgram) -> BlockProgram:
    """The same blocks without side streams, ending in ``logits`` instead of losses."""
    *body, last = program.blocks
    assert isinstance(last.module, PrependHead)
    head = PrependNextToken(last.module.pointer, last.module.log_prior_scale, last.module.layout)
    reads = ("question", "context_mask", "context_token", *ANSWER_INPUTS, "sequence")
    return answering(program, [*map(fused_only, body), Block(last.name, head, reads=reads, writes=("logits",))])
