"""What a trace measures, where the right value is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeline import Block, BlockProgram, Profile, trace
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


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="does not divide"):
        trace(fid_program(), fid_batch(), num_microbatches=4)
    with pytest.raises(ValueError, match="repeats is 0"):
        trace(fid_program(), fid_batch(), num_microbatches=3, repeats=0)
    with pytest.raises(ValueError, match="batch of 1 sample"):
        trace(fid_program(), {n: t[: len(t) // 6] for n, t in fid_batch().items()}, num_microbatches=1)
    with pytest.raises(ValueError, match="not a profile"):
        Profile.from_json("{}")
