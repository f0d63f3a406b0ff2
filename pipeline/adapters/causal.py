"""Causal decoders of ``transformers`` as programs: the Llama style and GPT-2.

B samples, L positions, K keys (L, or L and cached ones), D width, V vocabulary. Embedding, final norm and
head are the model's own modules; a layer is wrapped (`pipeline.adapters.layers`) and stays reachable as
``block.module.layer``. A head tied to the embedding is one parameter in two blocks.

Three ways to say where padding and positions are:

- default: ``padding=True``, positions 0 .. L-1 (right padding), rotary tables without a sample axis;
- ``positions=True``: a batch input ``position_ids``, for left padding and for generation with a cache;
- ``padding=False``: no mask input; every position is a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GPT2LMHeadModel,
    GPT2Model,
    LlamaForCausalLM,
    LlamaModel,
    MistralForCausalLM,
    MistralModel,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from pipeline.adapters.assembly import Loss, assemble, refuse_subclass, table
from pipeline.adapters.layers import PlainLayer, RotaryLayer
from pipeline.adapters.masks import CausalMask, attention_of
from pipeline.adapters.rotary import RotaryTable
from pipeline.program import Block, BlockProgram

HEADS: tuple[type, ...] = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
BODIES: tuple[type, ...] = (LlamaModel, MistralModel, Qwen2Model, Qwen3Model)


def llama_program(
    model: Any,
    *,
    padding: bool = True,
    positions: bool = False,
    with_loss: Loss | None = None,
    sample_id: bool = False,
) -> BlockProgram:
    """A Llama-style decoder: ``embed_tokens``, ``layers.<i>``, ``norm``, ``lm_head``.

    Batch inputs: ``input_ids`` (B, L), ``attention_mask`` (B, K; 0 at padding) if ``padding``,
    ``position_ids`` (B, L) if ``positions``. Output: ``logits`` (B, L, V), or ``last_hidden_state``
    (B, L, D) of a model without a head. Block names are the paths of the modules, so they begin with
    ``model.`` where there is a head.

    Args:
        model: Llama, Mistral, Qwen2 or Qwen3, with language modelling head or without.
        padding: the batch has ``attention_mask``.
        positions: the batch has ``position_ids``; otherwise positions are 0 .. L-1.
        with_loss: adds a last block that writes ``losses``, such as `token_loss`.
        sample_id: list ``sample_id`` among the batch inputs, for keyed randomness.

    Raises:
        ValueError: for rotary frequencies that depend on data, positions without padding, or a subclass
            that computes something else.
    """
    refuse_subclass(model, next(base for base in (*HEADS, *BODIES) if isinstance(model, base)))
    has_head = isinstance(model, HEADS)
    body, prefix = (model.model, "model.") if has_head else (model, "")
    refuse_subclass(body, next(base for base in BODIES if isinstance(body, base)))
    config, embed = body.config, body.embed_tokens
    windows = windows_of(config, len(body.layers))
    masks = {window: "mask" if window is None else "sliding_mask" for window in windows}
    if not padding and attention_of(config) == "sdpa":
        masks.pop(None, None)  # the kernel makes it
    place = ("position_ids",) if positions else ()
    blocks = [
        Block(f"{prefix}embed_tokens", embed, ("input_ids",), ("hidden",)),
        table(
            "rotary", RotaryTable(body.rotary_emb, embed), reads=("input_ids", *place), writes=("cos", "sin")
        ),
        *_mask_blocks(config, embed, masks, padding=padding, positions=positions),
    ]  # fmt: skip
    for i, layer in enumerate(body.layers):
        wrapped = RotaryLayer(layer, layer_index=i, config=config, positions=positions)
        mask = (masks[windows[i]],) if windows[i] in masks else ()
        blocks.append(Block(f"{prefix}layers.{i}", wrapped, ("hidden", "cos", "sin", *mask), ("hidden",)))
    blocks.append(Block(f"{prefix}norm", body.norm, ("hidden",), ("last_hidden_state",)))
    if not positions:
        axes: dict[str, str | None] = {"cos": None, "sin": None}
    else:
        axes = {}
    return _finish(
        model, blocks, has_head=has_head, padding=padding, axes=axes, with_loss=with_loss, sample_id=sample_id
    )


class GPT2Embedding(nn.Module):
    """Token and learned position embeddings of GPT-2."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = body.wte, body.wpe, body.drop

    def forward(self, ids_BL: Tensor, positions_BL: Tensor | None = None) -> Tensor:
        """(B, L, D)."""
        if positions_BL is None:
            positions_BL = torch.arange(ids_BL.shape[1], device=ids_BL.device)[None]
        return self.drop(self.wte(ids_BL) + self.wpe(positions_BL))


def gpt2_program(
    model: Any,
    *,
    padding: bool = True,
    positions: bool = False,
    with_loss: Loss | None = None,
    sample_id: bool = False,
) -> BlockProgram:
    """GPT-2: ``embed``, ``h.<i>``, ``ln_f``, ``lm_head``; inputs and options as in `llama_program`.

    Raises:
        ValueError: with cross-attention, positions without padding, or for a subclass that computes
            something else.
    """
    base = GPT2LMHeadModel if isinstance(model, GPT2LMHeadModel) else GPT2Model
    refuse_subclass(model, base)
    has_head = base is GPT2LMHeadModel
    body, prefix = (model.transformer, "transformer.") if has_head else (model, "")
    refuse_subclass(body, GPT2Model)
    if body.config.add_cross_attention:
        raise ValueError("config.add_cross_attention is set; this adapter lists decoders without an encoder")
    masks: dict[int | None, str] = {} if not padding and attention_of(body.config) == "sdpa" else {None: "mask"}
    place = ("position_ids",) if positions else ()
    blocks = [
        Block(f"{prefix}embed", GPT2Embedding(body), ("input_ids", *place), ("hidden",)),
        *_mask_blocks(body.config, body.wte, masks, padding=padding, positions=positions),
    ]
    for i, layer in enumerate(body.h):
        wrapped = PlainLayer(layer, layer_index=i, config=body.config, positions=positions)
        blocks.append(Block(f"{prefix}h.{i}", wrapped, ("hidden", *masks.values()), ("hidden",)))
    blocks.append(Block(f"{prefix}ln_f", body.ln_f, ("hidden",), ("last_hidden_state",)))
    return _finish(model, blocks, has_head=has_head, padding=padding, axes={}, with_loss=with_loss, sample_id=sample_id)


def windows_of(config: Any, num_layers: int) -> list[int | None]:
    """Sliding window of each layer (None: sees everything before it)."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * num_layers
    unknown = sorted(set(kinds[:num_layers]) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"layer type {unknown[0]!r} is unknown; allowed: 'full_attention', 'sliding_attention'")
    return [window if kind == "sliding_attention" else None for kind in kinds[:num_layers]]


def _mask_blocks(
    config: Any, embed: nn.Module, masks: dict[int | None, str], *, padding: bool, positions: bool
) -> list[Block]:
    if not getattr(config, "is_causal", True):
        raise ValueError("config.is_causal is False; this adapter lists causal decoders, set it True")
    if positions and not padding:
        raise ValueError("positions=True needs padding=True: give attention_mask (B, L), all ones if nothing is padded")
    reads = ("input_ids", "attention_mask") if padding else ("input_ids",)
    return [
        table(name, CausalMask(config, embed, window=window), reads=reads, writes=(name,))
        for window, name in masks.items()
    ]


def _finish(
    model: Any,
    blocks: list[Block],
    *,
    has_head: bool,
    padding: bool,
    axes: dict[str, str | None],
    with_loss: Loss | None,
    sample_id: bool,
) -> BlockProgram:
    if has_head:
        blocks = [*blocks, Block("lm_head", model.lm_head, ("last_hidden_state",), ("logits",))]
    if not padding:
        axes = {**axes, "mask": None, "sliding_mask": None}
    return assemble(
        model,
        blocks,
        inputs=("input_ids", "attention_mask", "position_ids"),
        outputs=("logits",) if has_head else ("last_hidden_state",),
        axes=axes,
        with_loss=with_loss,
        sample_id=sample_id,
    )
