"""Causal decoders of ``transformers`` that read documents in front of the question (RA-CM3, 2211.12561, reads so).

A sample is one row: documents, question, answer (`pipeline.adapters.rows` says why padding stays in it). Against fusion
in decoder there is no encoder and a document is read in the light of those before it; attention costs the square of all
their lengths.

Documents and questions are tokens, and vectors in front of them where there are pictures (`pipeline.adapters.prefix`).
Layers, norm, embedding and head are the model's own.

Shapes: B samples, k documents each, P = B*k pairs, M document tokens, H question tokens, T answer tokens, N vectors,
D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import GPT2LMHeadModel, GPT2Model

from pipeline.adapters.assembly import Loss, assemble, refuse_subclass, table
from pipeline.adapters.causal import BODIES, HEADS, windows_of
from pipeline.adapters.layers import CachedLayer, PlainLayer, RotaryLayer
from pipeline.adapters.prefix import Prefix
from pipeline.adapters.rotary import RotaryTable
from pipeline.adapters.rows import LearnedPositions, RowEmbedding, RowLayout, RowMask
from pipeline.adapters.streams import Alone, AnswerHead, AnswerNorm, EmbeddingStreams, LayerStreams, Streams
from pipeline.program import Block, BlockProgram


def prepend_program(
    model: Any,
    *,
    document_prefix: Prefix | None = None,
    question_prefix: Prefix | None = None,
    opening: Sequence[int] = (),
    alone: Alone = "none",
    answer_padding: bool = False,
    with_loss: Loss | None = None,
    sample_id: bool = False,
) -> BlockProgram:
    """``layout``, ``embed``, tables, ``layers.<i>`` (GPT-2: ``h.<i>``), ``norm``, ``lm_head``.

    Batch inputs: ``document`` and ``document_mask`` (P, M), axis ``pair``, the k documents of a sample adjacent;
    ``question`` and ``question_mask`` (B, H); ``answer_in`` (B, T), the tokens before each target: the first is the
    last one of the prompt, and is not in the question. Masks are 0 at padding, which may stand on either side. Answers
    are padded on the right, and their padding has targets of weight 0.

    Outputs: ``logits`` (B, T, V), ``logits[b, t]`` being of the token after ``answer_in[b, t]`` given all documents;
    and if ``alone``, ``alone_log_p`` (P, T), axis ``pair``: the log-probability of ``target[b, t]`` (a batch input
    then) given one document.

    Args:
        model: Llama, Mistral, Qwen2, Qwen3 or GPT-2 with its head.
        document_prefix, question_prefix: vectors in front of the tokens of each document, and of the question. They may
            share a module.
        opening: token ids in front of every row, such as a begin-of-text token and an instruction.
        alone: whether each document is also read by itself, without graph and dropout (``detached``), or with both, as
            objectives need that train the reader by it (``trained``).
        answer_padding: the batch has ``answer_mask`` (B, T, or cached positions and T); needed for generation.
        with_loss: adds a last block that writes ``losses``, such as `token_loss`.
        sample_id: list ``sample_id`` among the batch inputs, for keyed randomness.

    Raises:
        ValueError: for a model that is not of these classes, a subclass that computes something else, rotary
            frequencies that depend on data, an unknown ``alone``, or prefixes that read the same inputs.
    """
    if alone not in ("none", "detached", "trained"):
        raise ValueError(f"alone is {alone!r}; allowed: 'none', 'detached', 'trained'")
    two = alone != "none"
    stack = _stack(model, two=two)
    prefixes = {
        name: prefix for name, prefix in (("document", document_prefix), ("question", question_prefix)) if prefix
    }
    _check_prefixes(prefixes)
    answer = ("answer_in", "answer_mask") if answer_padding else ("answer_in",)
    masks = tuple(prefix.mask for prefix in prefixes.values())
    reads = ("document_mask", "question_mask", *answer, *masks)
    layout = RowLayout(
        reads=reads, num_opening=len(opening), alone=two,
        prefix_masks=(document_prefix.mask if document_prefix else "", question_prefix.mask if question_prefix else ""),
    )  # fmt: skip
    streams = ("", "alone_") if two else ("",)
    places = tuple(f"{stream}{name}" for stream in streams for name in ("position_ids", "attention_mask"))
    sequences = ("sequence", "alone_sequence")[: len(streams)]
    states = ("last_hidden_state", "alone_last_hidden_state")[: len(streams)]

    blocks = [
        Block(f"{name}_prefix", prefix.module, prefix.reads, (f"{name}_vectors",)) for name, prefix in prefixes.items()
    ]
    blocks.append(table("layout", layout, reads=reads, writes=places))
    reads = (
        "document", "question", "answer_in", *(f"{name}_vectors" for name in prefixes),
        *(f"{stream}position_ids" for stream in streams),
    )  # fmt: skip
    embedding = RowEmbedding(stack.tokens, stack.positions, reads=reads, opening=tuple(opening))
    blocks.append(Block(f"{stack.path}embed", EmbeddingStreams(embedding, alone=alone), reads, sequences))
    blocks += stack.tables
    for i, layer in enumerate(stack.layers):
        given = tuple(n for s, name in zip(streams, sequences, strict=True) for n in (name, *stack.reads(i, s)))
        streamed = LayerStreams(layer, alone=alone)
        blocks.append(Block(f"{stack.path}{stack.layers_name}.{i}", streamed, given, sequences))
    given = tuple(n for name in sequences for n in (name, "answer_in"))
    norm = Streams(AnswerNorm(stack.norm), alone=alone)
    blocks.append(Block(f"{stack.path}{stack.norm_name}", norm, given, states))
    outputs: tuple[str, ...] = ("logits", "alone_log_p") if two else ("logits",)
    head = AnswerHead(model.lm_head, alone=alone)
    blocks.append(Block("lm_head", head, (*states, *(("target",) if two else ())), outputs))

    of_pairs = ["document", "document_mask", "alone_log_p", "alone_sequence", "alone_last_hidden_state"]
    of_pairs += [name for block in (*stack.tables, blocks[len(prefixes)]) for name in block.writes if "alone" in name]
    if document_prefix is not None:
        of_pairs += [document_prefix.mask, *document_prefix.reads, "document_vectors"]
    extra = tuple(name for prefix in prefixes.values() for name in prefix.reads)
    return assemble(
        model,
        blocks,
        inputs=("document", "document_mask", "question", "question_mask", *answer, *masks, *extra, "target"),
        outputs=outputs,
        axes=dict.fromkeys(of_pairs, "pair"),
        with_loss=with_loss,
        sample_id=sample_id,
    )


@dataclass(frozen=True)
class _Stack:
    """What two families of decoders have in common, under one set of names."""

    path: str
    tokens: nn.Module
    positions: nn.Module | None
    layers: list[CachedLayer]
    layers_name: str
    norm: nn.Module
    norm_name: str
    tables: list[Block]
    masks: list[str]  # of each layer
    rotary: bool

    def reads(self, layer: int, stream: str) -> tuple[str, ...]:
        """What a layer reads beside its stream."""
        turned = (f"{stream}cos", f"{stream}sin") if self.rotary else ()
        return (*turned, f"{stream}{self.masks[layer]}")


def _stack(model: Any, *, two: bool) -> _Stack:
    streams = ("", "alone_") if two else ("",)
    windows: list[int | None]
    head = next((base for base in (*HEADS, GPT2LMHeadModel) if isinstance(model, base)), None)
    if head is None:
        allowed = ", ".join(base.__name__ for base in (*HEADS, GPT2LMHeadModel))
        raise ValueError(f"prepend_program lists the blocks of {allowed}, not of a {type(model).__name__}")
    refuse_subclass(model, head)
    if head is GPT2LMHeadModel:
        body = model.transformer
        refuse_subclass(body, GPT2Model)
        if body.config.add_cross_attention:
            raise ValueError("config.add_cross_attention is set; this adapter lists decoders without an encoder")
        tokens, layers, windows = body.wte, body.h, [None] * len(body.h)
    else:
        body = model.model
        refuse_subclass(body, next(base for base in BODIES if isinstance(body, base)))
        tokens, layers, windows = body.embed_tokens, body.layers, windows_of(body.config, len(body.layers))
    config = body.config
    if not getattr(config, "is_causal", True):
        raise ValueError("config.is_causal is False; this adapter lists causal decoders, set it True")
    names = {window: "mask" if window is None else "sliding_mask" for window in windows}
    tables = [
        table(
            f"{stream}{name}", RowMask(config, tokens, window=window),
            reads=(f"{stream}position_ids", f"{stream}attention_mask"), writes=(f"{stream}{name}",),
        )
        for stream in streams
        for window, name in names.items()
    ]  # fmt: skip
    masks = [names[window] for window in windows]
    if head is GPT2LMHeadModel:
        wrapped: list[CachedLayer] = [
            PlainLayer(layer, layer_index=i, config=config, positions=True) for i, layer in enumerate(layers)
        ]
        return _Stack(
            "transformer.", tokens, LearnedPositions(body), wrapped, "h", body.ln_f, "ln_f", tables, masks, False
        )
    wrapped = [RotaryLayer(layer, layer_index=i, config=config, positions=True) for i, layer in enumerate(layers)]
    tables += [
        table(
            f"{stream}rotary", RotaryTable(body.rotary_emb, tokens),
            reads=(f"{stream}position_ids", f"{stream}position_ids"), writes=(f"{stream}cos", f"{stream}sin"),
        )
        for stream in streams
    ]  # fmt: skip
    return _Stack("model.", tokens, None, wrapped, "layers", body.norm, "norm", tables, masks, True)


def _check_prefixes(prefixes: dict[str, Prefix]) -> None:
    if len(prefixes) < 2:
        return
    document, question = prefixes["document"], prefixes["question"]
    twice = sorted({document.mask, *document.reads} & {question.mask, *question.reads})
    if twice:
        raise ValueError(
            f"document_prefix and question_prefix both read {twice[0]!r}, but documents have a row a pair and "
            "questions a row a sample; give them inputs of their own"
        )
