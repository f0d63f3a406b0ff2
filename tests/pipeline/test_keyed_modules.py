"""make_keyed: the same model, with masks that do not depend on how a batch is cut.

Every case is a program of two layers with dropout and attention dropout; the whole batch in one piece
must give the losses and gradients of its micro-batches, in float64.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from pipeline import Block, BlockProgram, Pipeline, Plan, keyed, trace
from pipeline.keyed_modules import make_keyed
from pipeline.lineage import require_sample_lineage
from pipeline.verify import gradient_report, whole_batch_gradients
from tests.distributed import run_on_ranks
from tests.pipeline.keyed_layers import CASES, E, H, L, Loss, OwnAttention, P, batch, bert, program_of


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


def test_refused_attention_kernels() -> None:
    call = bert("sdpa")
    call.layer.attention.self.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"flash_attention_2.*sdpa"):
        make_keyed(call)


def test_harmless_modules_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 3), nn.MultiheadAttention(E, H), nn.AlphaDropout(0.0))
    before = repr(model)
    assert repr(make_keyed(model)) == before
