"""The reader as a block program: fusion in decoder (Izacard and Grave, 2007.01282), with pictures.

Read it top to bottom: pictures become patches, tokens and patches become one context per (question,
document) pair, encoder layers run over pairs, decoder layers over answers that attend to all documents of
their question, and the head turns that into loss contributions. The same list is what the planner cuts.
"""

from __future__ import annotations

from torch import Tensor

from pipeline import Block, BlockProgram
from rag_mm.objectives import ObjectivesConfig
from rag_mm.reader.config import ReaderConfig
from rag_mm.reader.embedding import AnswerEmbedding, ContextEmbedding, TokenEmbedding, Vision
from rag_mm.reader.head import HEAD_INPUTS, LossHead, Reading, Targets
from rag_mm.reader.layers import DecoderLayer, EncoderLayer, fuse

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
        *alone_PTD: Tensor,
    ) -> tuple[Tensor, Tensor]:
        rows = answer_in_BT.shape[0]
        score_Bk = self.scores(query_BE, document_PE)
        prior = self.prior(score_Bk, mask_PL.shape[1])
        fused = Reading(answer_BTD, fuse(context_PLD, rows), fuse(mask_PL, rows), fuse(token_PL, rows), prior)
        alone = [Reading(states, context_PLD, mask_PL, token_PL) for states in alone_PTD]
        targets = Targets(answer_in_BT, target_BT, target_weight_BT, sample_weight_B, distill_weight_B)
        return self.outputs(fused, alone, targets, score_Bk)


def fid_program(config: ReaderConfig, objective: ObjectivesConfig, *, vocabulary: int, image_size: int) -> BlockProgram:
    """Build the reader with fresh weights from torch's generator.

    Batch inputs (B samples, P = B*k pairs; see ``rag_mm.batch`` for how they are made): ``question`` (B, Q),
    ``question_image`` (B, 3, S, S), ``document`` and ``document_match`` (P, M), ``document_image`` (P, 3, S, S),
    ``context_mask`` and ``context_token`` (P, L), ``answer_in``, ``target`` and ``target_weight`` (B, T),
    ``sample_weight`` and ``distill_weight`` (B,), ``query_embedding`` (B, E), ``document_embedding`` (P, E),
    ``sample_id`` (B,).
    """
    streams, trained = ("answer", *objective.streams), objective.trained_streams
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
            "answer", AnswerEmbedding(tokens, trained=trained),
            reads=("answer_in", "document"), writes=streams,
        ),
        *(
            Block(
                f"decoder.{i}", DecoderLayer(config, trained=trained),
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
    pairs = (*PAIR_NAMES, *objective.streams)
    return BlockProgram(blocks, inputs=INPUTS, outputs=("losses", "statistics"), axes=dict.fromkeys(pairs, "pair"))


class FidDecoding:
    """What a fid reader makes of one batch: the context is encoded, and its keys and values projected, once."""

    def __init__(self, program: BlockProgram, context: dict[str, Tensor]) -> None:
        blocks = {block.name: block.module for block in program.blocks}
        head, answer = blocks["head"], blocks["answer"]
        assert isinstance(head, FidHead) and isinstance(answer, AnswerEmbedding)
        self._pointer, self._tokens = head.pointer, answer.tokens
        self._decoder = [module for module in blocks.values() if isinstance(module, DecoderLayer)]
        encoded = program.run(context, 0, program.index("answer"))["context"]
        rows = context["question"].shape[0]
        fused = fuse(encoded, rows)
        self._mask, self._token = fuse(context["context_mask"], rows), fuse(context["context_token"], rows)
        scores = head.scores(context["query_embedding"], context["document_embedding"])
        self._prior = head.prior(scores, encoded.shape[1])
        self._contexts = [layer.cross_attention.project(fused) for layer in self._decoder]
        self._keys = head.pointer.keys(fused)

    def following(self, answer_BT: Tensor) -> Tensor:
        """Distribution of the token after the answer so far (B, V)."""
        h = self._tokens(answer_BT)
        for layer, context in zip(self._decoder, self._contexts, strict=True):
            h = layer.stream(h, context, self._mask, dropout=False)
        parts = self._pointer.parts(h[:, -1:], self._keys, self._mask, self._token, answer_BT, self._prior)
        return self._pointer.distribution(parts, self._token)[:, -1]
