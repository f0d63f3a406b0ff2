"""make_keyed: the same model, with masks that do not depend on how a batch is cut.

Every case is a program of two layers with dropout and attention dropout; the whole batch in one piece
must give the losses and gradients of its micro-batches, in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import Block, BlockProgram, Pipeline, Plan, keyed, trace
from pipeline.keyed_functional import keyed_functional
from pipeline.keyed_modules import make_keyed
from pipeline.lineage import require_sample_lineage
from pipeline.verify import gradient_report, whole_batch_gradients
from tests.distributed import run_on_ranks

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


def microbatch_gradients(program: BlockProgram, whole: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for i in range(count):
        part = whole_batch_gradients(program, program.microbatch(whole, i, count), seed=3, step=4)
        for name, grad in part.gradients.items():
            total[name] = total.get(name, torch.zeros_like(grad)) + grad
    return total


@pytest.mark.parametrize("case", CASES)
def test_whole_batch_equals_micro_batches(case: str) -> None:
    program, whole = program_of(CASES[case]), batch()
    right = whole_batch_gradients(program, whole, seed=3, step=4)
    for count in (2, 3, 6):
        report = gradient_report(right.gradients, microbatch_gradients(program, whole, count), tolerance=1e-10)
        assert report, report.message
    other = whole_batch_gradients(program, whole, seed=3, step=5)
    assert not torch.allclose(right.loss, other.loss, rtol=1e-6), "no dropout happened"
    program.eval()
    assert not torch.allclose(right.loss, whole_batch_gradients(program, whole, seed=3, step=4).loss, rtol=1e-6)


def _pipelined_gradients(case: str, checkpointed: bool) -> dict[str, Tensor]:
    program = program_of(CASES[case], checkpointed=checkpointed)
    plan = Plan.from_cuts(program, [2], schedule="1f1b", num_microbatches=3)
    pipeline = Pipeline(program, plan, timeout_s=30)
    pipeline.step(batch(), seed=3, step=4)
    return {name: p.grad for name, p in pipeline.parameters_here.items() if p.grad is not None}


@pytest.mark.parametrize("checkpointed", [False, True])
def test_two_stages_on_real_ranks(checkpointed: bool) -> None:
    case = "nn.TransformerEncoderLayer"
    right = whole_batch_gradients(program_of(CASES[case]), batch(), seed=3, step=4).gradients
    seen: set[str] = set()
    for grads in run_on_ranks(_pipelined_gradients, 2, case, checkpointed):
        report = gradient_report(right, grads, tolerance=1e-10)
        assert report, report.message
        seen |= set(grads)
    assert seen == set(right)


def test_blocks_that_are_dropout_themselves() -> None:
    drop, attention = nn.Dropout(P), OwnAttention()
    blocks = [
        Block("a", drop, ("x",), ("h",)),
        Block("b", attention, ("h",), ("h",)),
        Block("c", drop, ("h",), ("h",)),
        Block("loss", Loss(), ("h",), ("losses",)),
    ]
    program = make_keyed(BlockProgram(blocks, inputs=("sample_id", "x"), outputs=("losses",)).double())
    assert isinstance(program, BlockProgram)
    assert [type(block.module).__name__ for block in program.blocks[:3]] == [
        "KeyedDropout", "KeyedOwnAttention", "KeyedDropout"
    ]  # fmt: skip
    assert program.blocks[0].module is program.blocks[2].module
    require_sample_lineage(trace(program, batch(), num_microbatches=2, repeats=1))


@pytest.mark.parametrize("case", ["nn.TransformerEncoderLayer", "T5"])
def test_lineage_is_sample_and_was_not(case: str) -> None:
    torch.manual_seed(0)
    program = BlockProgram(
        [Block("b", CASES[case](), ("x",), ("h",)), Block("loss", Loss(), ("h",), ("losses",))],
        inputs=("sample_id", "x"), outputs=("losses",),
    ).double()  # fmt: skip
    assert trace(program, batch(), num_microbatches=1, repeats=1).blocks[0].lineage == "batch"
    make_keyed(program)
    assert trace(program, batch(), num_microbatches=1, repeats=1).blocks[0].lineage == "sample"


@pytest.mark.parametrize("case", ["nn.TransformerEncoderLayer", "BERT sdpa", "T5"])
def test_checkpointing_repeats_the_masks(case: str) -> None:
    plain, checkpointed = program_of(CASES[case]), program_of(CASES[case], checkpointed=True)
    right = whole_batch_gradients(plain, batch(), seed=3, step=4)
    report = gradient_report(
        right.gradients, whole_batch_gradients(checkpointed, batch(), seed=3, step=4).gradients, tolerance=1e-10
    )
    assert report, report.message


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=5, hidden_size=E, num_hidden_layers=2, num_attention_heads=H, intermediate_size=16,
            attention_probs_dropout_prob=P, hidden_dropout_prob=P,
        )  # fmt: skip
        self.model = BertModel(config, add_pooling_layer=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(inputs_embeds=x).last_hidden_state


def encoder_gradients(*, before: bool, after: bool) -> tuple[dict[str, Tensor], int]:
    """Gradients of an encoder of transformers, checkpointed before or after it is keyed; and how many layer runs."""
    torch.manual_seed(0)
    encoder, calls = Encoder(), []
    blocks = [Block("b", encoder, ("x",), ("h",)), Block("loss", Loss(), ("h",), ("losses",))]
    program = BlockProgram(blocks, inputs=("sample_id", "x"), outputs=("losses",)).double()
    encoder.model.encoder.layer[0].output.dense.register_forward_hook(lambda *_: calls.append(1))
    if before:
        encoder.model.gradient_checkpointing_enable()
    make_keyed(program)
    if after:
        encoder.model.gradient_checkpointing_enable()
    return whole_batch_gradients(program, batch(), seed=3, step=4).gradients, len(calls)


def test_gradient_checkpointing_of_transformers_repeats_the_masks() -> None:
    (right, once), (found, twice) = (encoder_gradients(before=before, after=False) for before in (False, True))
    report = gradient_report(right, found, tolerance=1e-10)
    assert report, report.message
    assert (once, twice) == (1, 2)
    with pytest.raises(RuntimeError, match="enable gradient checkpointing before make_keyed"):
        encoder_gradients(before=False, after=True)


def draws(function: Callable[[], Any]) -> Any:
    with keyed.scope(seed=0, step=0), keyed.block("b", ids=torch.arange(3)), keyed_functional():
        return function()


TINY = 1e-13  # so small a probability that nothing is dropped: the right value is known


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"is_causal": True},
        {"scale": 0.2},
        {"attn_mask": torch.arange(20).view(4, 5) % 3 != 0},
        {"attn_mask": torch.zeros(4, 5, dtype=torch.float64).index_fill(1, torch.tensor([2]), -float("inf"))},
        {"attn_mask": torch.arange(4)[:, None].expand(4, 5) != 1},  # a row with nothing to attend to
    ],
)
def test_attention_is_torchs_apart_from_the_mask(more: dict[str, Any]) -> None:
    q, k, v = (torch.randn(3, 2, n, 4, dtype=torch.float64).requires_grad_() for n in (4, 5, 5))
    right = functional.scaled_dot_product_attention(q, k, v, **more)
    here = draws(lambda: functional.scaled_dot_product_attention(q, k, v, dropout_p=TINY, **more))
    torch.testing.assert_close(here, right, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(y.sin().sum(), (q, k, v)) for y in (right, here)]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-10, atol=1e-11)


def test_grouped_queries() -> None:
    q = torch.randn(3, 4, 5, 4, dtype=torch.float64)
    k, v = torch.randn(2, 3, 2, 5, 4, dtype=torch.float64)
    right = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    here = draws(lambda: functional.scaled_dot_product_attention(q, k, v, dropout_p=TINY, enable_gqa=True))
    torch.testing.assert_close(here, right, rtol=1e-12, atol=1e-12)


def test_attention_weights_are_dropped_per_sample() -> None:
    """With the identity as values the output is the dropped weights: 0 or weight / (1 - p)."""
    q, k = torch.randn(2, 3, 40, 8)
    eye = torch.eye(40).expand(3, 40, 40)
    weights = (q @ k.mT / 8**0.5).softmax(-1)
    here = draws(lambda: functional.scaled_dot_product_attention(q, k, eye, dropout_p=0.25))
    zero = here == 0
    assert abs(zero.double().mean().item() - 0.25) < 5 * (0.25 * 0.75 / zero.numel()) ** 0.5
    torch.testing.assert_close(here[~zero], (weights / 0.75)[~zero])
    assert not torch.equal(zero[0], zero[1])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kdim", [None, 6])
@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_is_torchs_apart_from_the_mask(
    batch_first: bool, kdim: int | None, need_weights: bool
) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, H, dropout=TINY, batch_first=batch_first, kdim=kdim, vdim=kdim).double()
    other = make_keyed(copy.deepcopy(module))
    q, kv = torch.randn(3, 4, E).double(), torch.randn(3, 5, kdim or E).double()
    if not batch_first:
        q, kv = q.transpose(0, 1), kv.transpose(0, 1)
    padding = torch.tensor([[False] * 5, [False] * 4 + [True], [True] + [False] * 4])
    mask = torch.zeros(4, 5, dtype=torch.float64).index_fill(1, torch.tensor([2]), -1.5)
    module.dropout = 0.0
    for more in ({}, {"key_padding_mask": padding}, {"attn_mask": mask, "key_padding_mask": padding.double() * -1e9}):
        right = module(q, kv, kv, need_weights=need_weights, **more)  # type: ignore[arg-type]
        with keyed.scope(seed=0, step=0), keyed.block("b", ids=torch.arange(3)):
            here = other(q, kv, kv, need_weights=need_weights, **more)
        torch.testing.assert_close(here, right, rtol=1e-11, atol=1e-11)


def test_functional_multihead_attention_takes_boolean_masks() -> None:
    m = nn.MultiheadAttention(E, H).double()
    q, kv = torch.randn(4, 3, E).double(), torch.randn(5, 3, E).double()
    masks = {
        "key_padding_mask": torch.tensor([[False] * 5, [False] * 4 + [True], [True] + [False] * 4]),
        "attn_mask": torch.zeros(4, 5, dtype=torch.bool).index_fill(1, torch.tensor([2]), True),
    }

    def attend(p: float) -> Tensor:
        projections = (m.in_proj_weight, m.in_proj_bias, None, None, False, p, m.out_proj.weight, m.out_proj.bias)
        return functional.multi_head_attention_forward(q, kv, kv, E, H, *projections, training=True, **masks)[0]

    torch.testing.assert_close(draws(lambda: attend(TINY)), attend(0.0), rtol=1e-11, atol=1e-11)


def test_names_weights_and_classes_stay() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 16, dropout=P, batch_first=True), 2)
    names = list(model.state_dict())
    parameters = [id(p) for p in model.parameters()]
    told: dict[str, str] = {}
    assert make_keyed(model, report=told.__setitem__) is model
    assert list(model.state_dict()) == names and [id(p) for p in model.parameters()] == parameters
    assert isinstance(model.layers[0].self_attn, nn.MultiheadAttention)
    assert told["layers.1.dropout1"] == "Dropout -> KeyedDropout(p=0.3)"
    assert told["layers.0.self_attn"] == "functional dropout in MultiheadAttention is keyed"
    assert len(told) == 2 * 4
    told.clear()
    make_keyed(model, report=told.__setitem__)
    assert not told  # a second time there is nothing left to do
    x = torch.randn(2, L, E)
    model.eval()
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_shared_dropout_modules_stay_shared_and_channels_fall_together() -> None:
    drop = nn.Dropout2d(0.5)
    model = make_keyed(nn.Sequential(drop, nn.Identity(), drop))
    assert model[0] is model[2]
    with keyed.scope(seed=0, step=0), keyed.block("b", ids=torch.arange(4)):
        y = model[0](torch.ones(4, 50, 3, 3))
    assert set(y.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(y, y[:, :, :1, :1].expand_as(y)) and 60 < (y[:, :, 0, 0] == 0).sum() < 140
    with pytest.raises(RuntimeError, match="3 dimensions; it needs 4"):
        model[0](torch.ones(4, 5, 3))


def test_in_place_dropout_changes_its_input() -> None:
    model, x = make_keyed(nn.Dropout(0.5, inplace=True)), torch.ones(2, 100)
    with keyed.scope(seed=0, step=0), keyed.block("b", ids=torch.arange(2)):
        assert model(x) is x
    assert set(x.unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.AlphaDropout(0.1), "the module \\(AlphaDropout\\).*p is 0.1"),
        (nn.Sequential(nn.ReLU(), nn.RReLU()), "1 \\(RReLU\\)"),
        (nn.Sequential(nn.LSTM(3, 3, 2, dropout=0.1)), "0 \\(LSTM\\).*dropout is 0.1"),
        (nn.Sequential(nn.Dropout(1.0)), "probability p is 1.0"),
        (nn.TransformerEncoderLayer(E, H), "batch_first=True"),
        (nn.MultiheadAttention(E, H, dropout=0.1, add_bias_kv=True), "bias_k"),
    ],
)
def test_refused_by_name(module: nn.Module, message: str) -> None:
    before = repr(module)
    with pytest.raises(ValueError, match=message):
        make_keyed(module)
    assert repr(module) == before


def test_refused_attention_kernels_and_functions() -> None:
    call = bert("sdpa")
    call.layer.attention.self.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"flash_attention_2.*sdpa"):
        make_keyed(call)
    with pytest.raises(RuntimeError, match="alpha_dropout draws from generator state"):
        draws(lambda: functional.alpha_dropout(torch.ones(3, 4), training=True))
    assert torch.equal(draws(lambda: functional.alpha_dropout(torch.ones(3, 4))), torch.ones(3, 4))
    assert torch.equal(draws(lambda: functional.dropout(torch.ones(3, 4), training=False)), torch.ones(3, 4))


def test_harmless_modules_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 3), nn.MultiheadAttention(E, H), nn.AlphaDropout(0.0))
    before = repr(model)
    assert repr(make_keyed(model)) == before
