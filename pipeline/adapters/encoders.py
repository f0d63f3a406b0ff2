"""Encoders of ``transformers`` as programs: the BERT family and ViT.

B samples, L tokens, S pixels a side, D width. Every block is the model's own module, so the program's
parameter names are those of the model.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import BertModel, RobertaModel, ViTModel, XLMRobertaModel

from pipeline.adapters.assembly import Loss, assemble, refuse_subclass, table
from pipeline.adapters.masks import BidirectionalMask
from pipeline.program import Block, BlockProgram

BERT_FAMILY: tuple[type, ...] = (BertModel, RobertaModel, XLMRobertaModel)


def bert_program(
    model: Any,
    *,
    padding: bool = True,
    token_types: bool = False,
    with_loss: Loss | None = None,
    sample_id: bool = False,
) -> BlockProgram:
    """An encoder of the BERT family: ``embeddings``, ``encoder.layer.<i>``, ``pooler``.

    Batch inputs: ``input_ids`` (B, L), ``attention_mask`` (B, L; 0 at padding), ``token_type_ids`` (B, L).
    Outputs: ``last_hidden_state`` (B, L, D) and, where the model has a pooler, ``pooler_output`` (B, D).

    Args:
        model: a ``BertModel``, ``RobertaModel`` or ``XLMRobertaModel``.
        padding: the batch has ``attention_mask``; without it every position is a token.
        token_types: the batch has ``token_type_ids``; without it they are zero.
        with_loss: adds a last block that writes ``losses``.
        sample_id: list ``sample_id`` among the batch inputs, for keyed randomness.

    Raises:
        ValueError: for a decoder, or a subclass that computes something else.
    """
    base = next(base for base in BERT_FAMILY if isinstance(model, base))
    refuse_subclass(model, base)
    if model.config.is_decoder or model.config.add_cross_attention:
        raise ValueError("config.is_decoder or add_cross_attention is set; this adapter lists encoders, set both False")
    ids = ("input_ids", "token_type_ids") if token_types else ("input_ids",)
    mask = ("mask",) if padding else ()
    names = [*["hidden"] * len(model.encoder.layer), "last_hidden_state"]
    blocks = [Block("embeddings", model.embeddings, ids, (names[0],))]
    if padding:
        reads = ("input_ids", "attention_mask")
        blocks.append(table("mask", BidirectionalMask(model.config, model.embeddings), reads=reads, writes=mask))
    for i, layer in enumerate(model.encoder.layer):
        blocks.append(Block(f"encoder.layer.{i}", layer, (names[i], *mask), (names[i + 1],)))
    return _with_pooler(
        model, blocks, inputs=(*ids, "attention_mask"), with_loss=with_loss, sample_id=sample_id
    )  # fmt: skip


def vit_program(model: Any, *, with_loss: Loss | None = None, sample_id: bool = False) -> BlockProgram:
    """A vision transformer: ``embeddings``, ``layers.<i>``, ``layernorm``, ``pooler``.

    Batch input: ``pixel_values`` (B, C, S, S) in the type of the weights. Outputs: ``last_hidden_state``
    (B, 1 + patches, D) and, where the model has a pooler, ``pooler_output`` (B, D).

    Args:
        model: a ``ViTModel``.
        with_loss: adds a last block that writes ``losses``.
        sample_id: list ``sample_id`` among the batch inputs, for keyed randomness.

    Raises:
        ValueError: for a subclass that computes something else.
    """
    refuse_subclass(model, ViTModel)
    blocks = [
        Block("embeddings", model.embeddings, ("pixel_values",), ("hidden",)),
        *(Block(f"layers.{i}", layer, ("hidden",), ("hidden",)) for i, layer in enumerate(model.layers)),
        Block("layernorm", model.layernorm, ("hidden",), ("last_hidden_state",)),
    ]
    return _with_pooler(model, blocks, inputs=("pixel_values",), with_loss=with_loss, sample_id=sample_id)


def _with_pooler(
    model: Any, blocks: list[Block], *, inputs: tuple[str, ...], with_loss: Loss | None, sample_id: bool
) -> BlockProgram:
    outputs: tuple[str, ...] = ("last_hidden_state",)
    pooler: nn.Module | None = model.pooler
    if pooler is not None:
        blocks = [*blocks, Block("pooler", pooler, ("last_hidden_state",), ("pooler_output",))]
        outputs = ("last_hidden_state", "pooler_output")
    return assemble(model, blocks, inputs=inputs, outputs=outputs, with_loss=with_loss, sample_id=sample_id)
