"""What a trace measures, where the right value is known."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline import Block, BlockProgram, Profile, trace
from pipeline.trace import CACHE_BYTES
from tests.pipeline.fid_program import D, K, S, T, V, fid_batch, fid_program


def test_bytes_flops_and_ties() -> None:
    profile = trace(fid_program(), fid_batch(6), num_microbatches=3, repeats=1, lineage=False)
    embed, _, _, target, _, head = profile.blocks
    ctx, mask, y = 2 * K * S * D * 8, 2 * K * S, 2 * T * D * 8  # two samples, float64
    assert profile.carry_bytes == (ctx + mask, ctx + mask, ctx + mask, ctx + mask + y, ctx + y, 0)
    assert embed.parameter_bytes == target.parameter_bytes == V * D * 8 and head.parameter_bytes == V * D * 8 + 8
    assert embed.ties == target.ties == head.ties == {"embed.table.weight": V * D * 8}
    assert head.flops == 2 * 2 * T * D * V  # one matrix product, two operations a multiply-add
    assert target.activation_bytes == 0 and target.written_bytes == y  # its ids are an input
    assert all(b.forward_s > 0 and b.backward_s > 0 for b in profile.blocks)
    assert Profile.from_json(profile.to_json()) == profile


def test_saved_activations_leave_out_parameters_and_inputs() -> None:
    """sin saves its input (the product, 4 x 8 floats); the product saves the input and the weight."""
    module = nn.Sequential(nn.Linear(3, 8, bias=False), type("Sin", (nn.Module,), {"forward": lambda _, x: x.sin()})())
    program = BlockProgram([Block("b", module, ("x",), ("losses",))], inputs=("x",), outputs=("losses",))
    block = trace(program, {"x": torch.randn(4, 3)}, num_microbatches=1, repeats=1).blocks[0]
    assert block.activation_bytes == 4 * 8 * 4 == block.written_bytes


def test_nan_names_the_block() -> None:
    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - x.abs() - 1).log()

    program = BlockProgram([Block("bad", Log(), ("x",), ("losses",))], inputs=("x",), outputs=("losses",))
    with pytest.raises(ValueError, match="block 'bad' gives NaN in 'losses'"):
        trace(program, {"x": torch.randn(4, 3)}, num_microbatches=1)


def test_nan_in_a_backward_names_the_block() -> None:
    class Root(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h + (0 * h).sqrt()  # the gradient of the root is infinite, times 0

    program = BlockProgram(
        [Block("good", nn.Linear(3, 3), ("x",), ("h",)), Block("bad", Root(), ("h",), ("losses",))],
        inputs=("x",), outputs=("losses",),
    )  # fmt: skip
    with pytest.raises(ValueError, match="block 'bad' gives NaN in the gradient of 'h'"):
        trace(program, {"x": torch.randn(8, 3)}, num_microbatches=1, repeats=1, lineage=False)


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="does not divide"):
        trace(fid_program(), fid_batch(), num_microbatches=4)
    lacking = {name: tensor for name, tensor in fid_batch().items() if name != "target"}
    with pytest.raises(ValueError, match=r"the batch lacks input 'target', which a block reads$"):
        trace(fid_program(), lacking, num_microbatches=3)
    with pytest.raises(ValueError, match=r"lacks input 'target'.*did you mean 'targets'"):
        trace(fid_program(), {**lacking, "targets": fid_batch()["target"]}, num_microbatches=3)
    with pytest.raises(ValueError, match="repeats is 0"):
        trace(fid_program(), fid_batch(), num_microbatches=3, repeats=0)
    with pytest.raises(ValueError, match="batch of 1 sample"):
        trace(fid_program(), {n: t[: len(t) // 6] for n, t in fid_batch().items()}, num_microbatches=1)
    with pytest.raises(ValueError, match="not a profile"):
        Profile.from_json("{}")


def test_a_frozen_block_costs_no_backward() -> None:
    tower, head = nn.Linear(3, 64), nn.Linear(64, 1)
    tower.requires_grad_(False)
    program = BlockProgram(
        [
            Block("tower", nn.Sequential(tower, nn.ReLU()), ("x",), ("h",)),
            Block("head", head, ("h",), ("losses",)),
        ],
        inputs=("x",),
        outputs=("losses",),
    )
    profile = trace(program, {"x": torch.randn(4, 3)}, num_microbatches=1, lineage=False)
    frozen, trained = profile.blocks
    assert frozen.backward_s == 0.0 == frozen.backward_flops and frozen.activation_bytes == 0
    assert frozen.frozen_bytes == frozen.parameter_bytes == (3 * 64 + 64) * 4
    assert trained.backward_s > 0 and trained.frozen_bytes == 0
    assert profile.carry_bytes == (4 * 64 * 4, 0) and profile.gradient_bytes == (0, 0)  # nothing comes back
    # A frozen block behind a trained one passes gradients on: twice the weight's product, without its own.
    behind = trace(program, {"x": torch.randn(4, 3).requires_grad_()}, num_microbatches=1, lineage=False)
    assert behind.blocks[0].backward_s > 0 and behind.blocks[0].backward_flops == 2 * 4 * 3 * 64
    assert behind.gradient_bytes == (4 * 64 * 4, 0)


def test_backward_flops_and_bytes_of_a_product() -> None:
    program = BlockProgram(
        [Block("b", nn.Linear(8, 16, bias=False), ("x",), ("losses",))], inputs=("x",), outputs=("losses",)
    )
    block = trace(program, {"x": torch.randn(4, 8).requires_grad_()}, num_microbatches=1, lineage=False).blocks[0]
    assert block.flops == 2 * 4 * 8 * 16 and block.backward_flops == 2 * block.flops
    assert block.bytes_moved >= (4 * 8 + 8 * 16 + 4 * 16) * 4


def test_attention_on_a_cpu_counts() -> None:
    class Attend(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(q, q, q)

    program = BlockProgram([Block("b", Attend(), ("q",), ("losses",))], inputs=("q",), outputs=("losses",))
    block = trace(program, {"q": torch.randn(2, 3, 16, 8).requires_grad_()}, num_microbatches=1, lineage=False).blocks[
        0
    ]
    assert block.flops == 2 * (2 * 2 * 3 * 16 * 16 * 8)  # two products
    assert block.backward_flops >= 2 * block.flops


class Slice(nn.Module):
    """Uses the first rows of somebody else's weight, held as a plain attribute."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.rows = weight[:2]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.rows.T


class Join(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a[:, :1] + b[:, :1]


def test_partial_ties_are_found() -> None:
    table = nn.Linear(6, 10, bias=False)
    view = nn.Linear(6, 4, bias=False)
    view.weight = nn.Parameter(table.weight.detach()[4:8])  # another parameter in the same storage
    other = nn.Linear(10, 6, bias=False)
    blocks = [
        Block("table", table, ("x",), ("h",)),
        Block("back", other, ("h",), ("h",)),
        Block("view", view, ("h",), ("a",)),
        Block("slice", Slice(table.weight), ("h",), ("b",)),
        Block("join", Join(), ("a", "b"), ("losses",)),
    ]
    program = BlockProgram(blocks, inputs=("x",), outputs=("losses",))
    profile = trace(program, {"x": torch.randn(4, 6)}, num_microbatches=1, repeats=1, lineage=False)
    found = {b.name: b.partial_ties for b in profile.blocks}
    assert found["table"] == {"table.weight": 4 * 6 * 4} and found["view"] == {"table.weight": 4 * 6 * 4}
    assert found["slice"] == {"table.weight": 2 * 6 * 4} and found["back"] == found["join"] == {}
    assert all(b.ties == {} for b in profile.blocks)


class Watch(TorchDispatchMode):
    """What is added in place, by shape, between the clock's readings."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket == torch.ops.aten.add_:
            self.seen.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_times_are_those_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches are emptied before the clock starts for a forward; adding to ``.grad`` is part of a backward.

    In a step other blocks run between two calls of a block, and micro-batches' gradients are added up.
    """
    filled = sys.modules["pipeline.trace"]._filler()
    assert filled.numel() == CACHE_BYTES >= 64 << 20  # more than the last-level cache of a server's core complex
    watch = Watch()
    monkeypatch.setattr(sys.modules["pipeline.trace"], "_now", lambda _: watch.seen.append("clock") or 0.0)
    program = BlockProgram([Block("b", nn.Linear(7, 5), ("x",), ("losses",))], inputs=("x",), outputs=("losses",))
    with watch:
        trace(program, {"x": torch.randn(4, 7)}, num_microbatches=1, repeats=2, warmup=1, lineage=False)
    once = [(CACHE_BYTES,), "clock", "clock", "clock", (5, 7), (5,), "clock"]  # forward, then backward
    assert watch.seen == once * 3


def test_progress_is_told() -> None:
    told: list[tuple[int, int, str]] = []
    trace(
        fid_program(), fid_batch(), num_microbatches=3, repeats=1, lineage=False, progress=lambda *now: told.append(now)
    )
    names = ["embed", "encoder.0", "encoder.1", "target", "decoder.0", "head", "traced"]
    assert told == [(i, 6, name) for i, name in enumerate(names)]
