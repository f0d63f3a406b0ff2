"""Layers of torch, transformers and one's own, with dropout and attention dropout, and a program of two of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import Block, BlockProgram, keyed
from pipeline.keyed_modules import make_keyed

B, L, E, H = 6, 5, 8, 2
P = 0.3


class Loss(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h.sin().flatten(1).sum(1, keepdim=True) / B


class Call(nn.Module):
    """Calls a layer of somebody else's library and takes its hidden states."""

    def __init__(self, layer: nn.Module, use: Callable[[nn.Module, Tensor], Any], checkpointed: bool = False) -> None:
        super().__init__()
        self.layer, self.use, self.checkpointed = layer, use, checkpointed

    def forward(self, h: Tensor) -> Tensor:
        def function(x: Tensor) -> Any:
            return self.use(self.layer, x)

        result = keyed.checkpoint(function, h) if self.checkpointed else function(h)
        return result[0] if isinstance(result, tuple) else result


class OwnAttention(nn.Module):
    """What people write: functional attention and functional dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(E, 3 * E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=P if self.training else 0.0, is_causal=True)
        return x + functional.dropout(y.transpose(1, 2).flatten(2), P, self.training)


def torch_layer() -> Call:
    layer = nn.TransformerEncoderLayer(E, H, 16, dropout=P, batch_first=True)
    return Call(layer, lambda layer, x: layer(x))


def torch_decoder_layer() -> Call:
    layer = nn.TransformerDecoderLayer(E, H, 16, dropout=P, batch_first=True)
    return Call(layer, lambda layer, x: layer(x, x.flip(1)))


def attention_first_axis_length() -> Call:
    layer = nn.MultiheadAttention(E, H, dropout=P)
    return Call(
        layer, lambda layer, x: x + layer(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1))[0].transpose(0, 1)
    )


def bert(implementation: str) -> Call:
    from transformers.models.bert.modeling_bert import BertConfig, BertLayer

    config = BertConfig(
        hidden_size=E,
        num_attention_heads=H,
        intermediate_size=16,
        attention_probs_dropout_prob=P,
        hidden_dropout_prob=P,
    )
    config._attn_implementation = implementation
    return Call(BertLayer(config), lambda layer, x: layer(x))


def vit() -> Call:
    from transformers.models.vit.modeling_vit import ViTConfig, ViTLayer

    config = ViTConfig(hidden_size=E, num_attention_heads=H, intermediate_size=16, attention_probs_dropout_prob=P)
    config._attn_implementation = "sdpa"
    return Call(ViTLayer(config), lambda layer, x: layer(x))


def llama() -> Call:
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=E, num_attention_heads=H, num_key_value_heads=1, intermediate_size=16, attention_dropout=P
    )
    config._attn_implementation = "sdpa"
    rotary = LlamaRotaryEmbedding(config)

    def use(layer: nn.Module, x: Tensor) -> Any:
        positions = torch.arange(x.shape[1])[None]
        return layer(x, position_embeddings=rotary(x, positions), position_ids=positions)

    return Call(LlamaDecoderLayer(config, 0), use)


def gpt2() -> Call:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2Config

    config = GPT2Config(n_embd=E, n_head=H, attn_pdrop=P, resid_pdrop=P)
    config._attn_implementation = "sdpa"
    return Call(GPT2Block(config, layer_idx=0), lambda layer, x: layer(x))


def t5() -> Call:
    from transformers.models.t5.modeling_t5 import T5Block, T5Config

    config = T5Config(d_model=E, d_kv=4, d_ff=16, num_heads=H, dropout_rate=P)
    config._attn_implementation = "eager"
    return Call(T5Block(config, has_relative_attention_bias=True), lambda layer, x: layer(x))


CASES: dict[str, Callable[[], nn.Module]] = {
    "nn.TransformerEncoderLayer": torch_layer,
    "nn.TransformerDecoderLayer": torch_decoder_layer,
    "nn.MultiheadAttention": attention_first_axis_length,
    "functional calls": OwnAttention,
    "BERT eager": lambda: bert("eager"),
    "BERT sdpa": lambda: bert("sdpa"),
    "ViT": vit,
    "Llama": llama,
    "GPT-2": gpt2,
    "T5": t5,
}


def program_of(make: Callable[[], nn.Module], *, checkpointed: bool = False) -> BlockProgram:
    torch.manual_seed(0)
    layers = [make() for _ in range(2)]
    for layer in layers:
        if isinstance(layer, Call):
            layer.checkpointed = checkpointed
    blocks = [Block(f"layer.{i}", layer, ("h",), ("h",)) for i, layer in enumerate(layers)]
    blocks = [Block("first", nn.Linear(E, E), ("x",), ("h",)), *blocks, Block("loss", Loss(), ("h",), ("losses",))]
    program = BlockProgram(blocks, inputs=("sample_id", "x"), outputs=("losses",)).double().train()
    assert make_keyed(program) is program
    return program


def batch() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    return {"sample_id": torch.arange(B) * 3 + 7, "x": torch.randn(B, L, E, generator=g, dtype=torch.float64)}
