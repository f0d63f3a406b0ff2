"""The reader as a block program: fusion in decoder (Izacard and Grave, 2007.01282), with pictures.

Read it top to bottom: pictures become patches, tokens and patches become one context per (question,
document) pair, encoder layers run over pairs, decoder layers over answers that attend to all documents of
their question, and the head turns that into loss contributions. The same list is what the planner cuts.
"""

from __future__ import annotations

from pipeline import Block, BlockProgram
from rag_mm.objectives import ObjectivesConfig
from rag_mm.reader.config import ReaderConfig
from rag_mm.reader.embedding import AnswerEmbedding, ContextEmbedding, TokenEmbedding, Vision
from rag_mm.reader.head import LossHead
from rag_mm.reader.layers import DecoderLayer, EncoderLayer

PAIR_NAMES = (
    "document", "document_match", "document_image", "context_mask", "context_token", "document_embedding",
    "document_patches", "context",
)  # fmt: skip
INPUTS = (
    "sample_id", "question", "question_image", "document", "document_match", "document_image", "context_mask",
    "context_token",
    "answer_in", "target", "target_weight", "sample_weight", "query_embedding", "document_embedding",
)  # fmt: skip


def fid_program(config: ReaderConfig, objective: ObjectivesConfig, *, vocabulary: int, image_size: int) -> BlockProgram:
    """Build the reader with fresh weights from torch's generator.

    Batch inputs (B samples, P = B*k pairs; see ``rag_mm.batch`` for how they are made): ``question`` (B, Q),
    ``question_image`` (B, 3, S, S), ``document`` and ``document_match`` (P, M), ``document_image`` (P, 3, S, S),
    ``context_mask`` and ``context_token`` (P, L), ``answer_in``, ``target`` and ``target_weight`` (B, T),
    ``sample_weight`` (B,), ``query_embedding`` (B, E), ``document_embedding`` (P, E), ``sample_id`` (B,).
    """
    per_document = objective.pdist > 0 or objective.emdr2 > 0
    streams = ("answer", "alone") if per_document else ("answer",)
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
            "answer", AnswerEmbedding(tokens, per_document=per_document),
            reads=("answer_in", "document"), writes=streams,
        ),
        *(
            Block(f"decoder.{i}", DecoderLayer(config), reads=("context", "context_mask", *streams), writes=streams)
            for i in range(config.decoder_layers)
        ),
        Block(
            "head", LossHead(config, tokens, objective),
            reads=(
                "context", "context_mask", "context_token", "answer_in", "target", "target_weight",
                "sample_weight", "query_embedding", "document_embedding", *streams,
            ),
            writes=("losses", "statistics"),
        ),
    ]  # fmt: skip
    pairs = (*PAIR_NAMES, "alone") if per_document else PAIR_NAMES
    return BlockProgram(blocks, inputs=INPUTS, outputs=("losses", "statistics"), axes=dict.fromkeys(pairs, "pair"))
