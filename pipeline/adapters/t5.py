"""T5 as a program, also as fusion in decoder (Izacard and Grave, 2007.01282).

B samples, k documents a sample, P = B*k pairs, M tokens of a pair, T target positions, K = k*M (or M),
D width, N heads, V vocabulary. With fusion the encoder reads each (question, document) pair as a row of
its own and the decoder attends to the k documents of its sample one after the other.

Each stack's relative position bias is a block: (1, N, M, M) without a sample axis, read by all layers of
the stack. Its table also belongs to the stack's first layer, which does not use it then; as with the
shared embedding, that is one parameter in several blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, T5ForConditionalGeneration

from pipeline.adapters.assembly import Loss, assemble, refuse_subclass, table
from pipeline.adapters.layers import CachedLayer
from pipeline.adapters.masks import BidirectionalMask, CausalMask
from pipeline.program import SAMPLE_ID, Block, BlockProgram

PAIR_NAMES = ("input_ids", "attention_mask", "encoder_hidden", "encoder_mask", "encoder_output")


class PositionBias(nn.Module):
    """The relative position bias of a stack, from its first layer's table."""

    def __init__(self, stack: Any) -> None:
        super().__init__()
        attention = stack.block[0].layer[0].SelfAttention
        self.relative_attention_bias = attention.relative_attention_bias
        self._bucket = attention._relative_position_bucket  # a static method
        self._options = {
            "bidirectional": not attention.is_decoder,
            "num_buckets": attention.relative_attention_num_buckets,
            "max_distance": attention.relative_attention_max_distance,
        }

    def forward(self, ids_BQ: Tensor, mask_BK: Tensor | None = None) -> Tensor:
        """(1, N, Q, K) for queries at the last Q of K positions (K = Q without a mask); reads only the lengths."""
        num_keys = ids_BQ.shape[1] if mask_BK is None else mask_BK.shape[1]
        keys = torch.arange(num_keys, device=ids_BQ.device)
        distance_QK = keys[None] - keys[num_keys - ids_BQ.shape[1] :, None]
        bias_QKN = self.relative_attention_bias(self._bucket(distance_QK, **self._options))
        return bias_QKN.permute(2, 0, 1)[None]


class StackEmbedding(nn.Module):
    """Token embedding and the dropout after it."""

    def __init__(self, stack: Any) -> None:
        super().__init__()
        self.embed_tokens, self.dropout = stack.embed_tokens, stack.dropout

    def forward(self, ids_BM: Tensor) -> Tensor:
        """(B, M, D)."""
        return self.dropout(self.embed_tokens(ids_BM))


class FinalNorm(nn.Module):
    """The norm after a stack, and the dropout after it."""

    def __init__(self, stack: Any) -> None:
        super().__init__()
        self.final_layer_norm, self.dropout = stack.final_layer_norm, stack.dropout

    def forward(self, hidden_BMD: Tensor) -> Tensor:
        """(B, M, D)."""
        return self.dropout(self.final_layer_norm(hidden_BMD))


class T5EncoderLayer(nn.Module):
    """An encoder layer that is given its position bias."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_PMD: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
        """(P, M, D)."""
        return self.layer(hidden_PMD, attention_mask=mask, position_bias=bias)[0]


class T5DecoderLayer(CachedLayer):
    """A decoder layer that is given its position bias; keys and values of the context are cached as well."""

    def __init__(self, layer: nn.Module, *, layer_index: int, decoder_padding: bool) -> None:
        super().__init__(layer, layer_index=layer_index, unknown="" if decoder_padding else "decoder_padding=True")

    def new_cache(self) -> Any:
        return EncoderDecoderCache(DynamicCache(), DynamicCache())

    def forward(
        self, hidden_BTD: Tensor, bias: Tensor, mask: Tensor, context_BKD: Tensor, context_mask: Tensor | None = None
    ) -> Tensor:
        """(B, T, D)."""
        return self.layer(
            hidden_BTD,
            attention_mask=mask,
            position_bias=bias,
            encoder_hidden_states=context_BKD,
            encoder_attention_mask=context_mask,
            **self._options(hidden_BTD.shape[1], mask),
        )[0]


class Fuse(nn.Module):
    """Documents of a sample, one after the other."""

    def forward(self, pairs_PMD: Tensor, sample_id_B: Tensor) -> Tensor:
        """(B, k*M, D); of ``sample_id`` only the number matters."""
        return pairs_PMD.reshape(sample_id_B.shape[0], -1, pairs_PMD.shape[-1])


class T5Head(nn.Module):
    """Vocabulary logits, with the scaling that tied embeddings need."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.lm_head = model.lm_head
        self.scale = model.model_dim**-0.5 if model.config.scale_decoder_outputs else 1.0

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """(B, T, V)."""
        return self.lm_head(hidden_BTD if self.scale == 1.0 else hidden_BTD * self.scale)


def t5_program(
    model: Any,
    *,
    fid: bool = False,
    padding: bool = True,
    decoder_padding: bool = False,
    with_loss: Loss | None = None,
    sample_id: bool = False,
) -> BlockProgram:
    """``encoder.embed``, ``encoder.bias``, ``encoder.block.<i>``, ``encoder.norm``, the same for ``decoder``, ``head``.

    Batch inputs: ``input_ids`` and ``attention_mask`` (B, M), with ``fid`` (P, M) and axis ``pair``;
    ``decoder_input_ids`` (B, T); ``decoder_attention_mask`` (B, T, or cached positions and T) if
    ``decoder_padding``. Output: ``logits`` (B, T, V).

    Args:
        model: a ``T5ForConditionalGeneration``.
        fid: fusion in decoder; the k rows of a sample are adjacent, and ``sample_id`` (B,) is a batch input that
            says how many samples there are.
        padding: the batch has ``attention_mask``. It says for every sample which tokens may be seen, so give
            each sample at least one.
        decoder_padding: the batch has ``decoder_attention_mask``; needed for generation with a cache, where its
            length says how many positions are cached.
        with_loss: adds a last block that writes ``losses``, such as `token_loss`.
        sample_id: list ``sample_id`` among the batch inputs, for keyed randomness.

    Raises:
        ValueError: for a subclass that computes something else.
    """
    refuse_subclass(model, T5ForConditionalGeneration)
    encoder, decoder = model.encoder, model.decoder
    encoder_mask = ("encoder_mask",) if padding else ()
    context_mask = ("context_mask",) if padding else ()
    target = ("decoder_input_ids", "decoder_attention_mask") if decoder_padding else ("decoder_input_ids",)
    context = "context" if fid else "encoder_output"
    blocks = [
        Block("encoder.embed", StackEmbedding(encoder), ("input_ids",), ("encoder_hidden",)),
        table("encoder.bias", PositionBias(encoder), reads=("input_ids",), writes=("encoder_bias",)),
    ]
    if padding:
        made = BidirectionalMask(encoder.config, model.lm_head)
        blocks.append(table("encoder.mask", made, reads=("input_ids", "attention_mask"), writes=encoder_mask))
    reads = ("encoder_hidden", "encoder_bias", *encoder_mask)
    for i, layer in enumerate(encoder.block):
        blocks.append(Block(f"encoder.block.{i}", T5EncoderLayer(layer), reads, ("encoder_hidden",)))
    blocks.append(Block("encoder.norm", FinalNorm(encoder), ("encoder_hidden",), ("encoder_output",)))
    if fid:
        blocks.append(Block("fuse", Fuse(), ("encoder_output", SAMPLE_ID), ("context",)))
    blocks += [
        Block("decoder.embed", StackEmbedding(decoder), ("decoder_input_ids",), ("decoder_hidden",)),
        table("decoder.bias", PositionBias(decoder), reads=target, writes=("decoder_bias",)),
        table("decoder.mask", CausalMask(decoder.config, model.lm_head), reads=target, writes=("decoder_mask",)),
    ]
    if padding:
        made = BidirectionalMask(decoder.config, model.lm_head)
        reads = ("decoder_input_ids", "attention_mask")
        blocks.append(table("decoder.context_mask", made, reads=reads, writes=context_mask))
    reads = ("decoder_hidden", "decoder_bias", "decoder_mask", context, *context_mask)
    for i, layer in enumerate(decoder.block):
        wrapped = T5DecoderLayer(layer, layer_index=i, decoder_padding=decoder_padding)
        blocks.append(Block(f"decoder.block.{i}", wrapped, reads, ("decoder_hidden",)))
    blocks += [
        Block("decoder.norm", FinalNorm(decoder), ("decoder_hidden",), ("decoder_output",)),
        Block("head", T5Head(model), ("decoder_output",), ("logits",)),
    ]
    axes: dict[str, str | None] = {"encoder_bias": None, "decoder_bias": None}
    if fid:
        axes |= dict.fromkeys(PAIR_NAMES, "pair")
    if not decoder_padding:
        axes["decoder_mask"] = None
    return assemble(
        model,
        blocks,
        inputs=("input_ids", "attention_mask", *target),
        outputs=("logits",),
        axes=axes,
        with_loss=with_loss,
        sample_id=sample_id,
    )
