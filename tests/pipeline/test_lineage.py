"""Mixing of samples is found, whatever form it takes, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import Block, BlockProgram, keyed, trace
from pipeline.lineage import require_sample_lineage
from tests.pipeline.fid_program import fid_batch, fid_program

B, D = 6, 5


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class _BackwardMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(0)


class _BackwardNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.norm()


class _BackwardValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].abs().max()


def capacity(x: Tensor) -> Tensor:
    """An expert with room for two: later samples that choose it are dropped."""
    chosen = x[:, 0] > 0
    return x * ((chosen.cumsum(0) <= 2) | ~chosen)[:, None]


def contrastive(x: Tensor) -> Tensor:
    return (x @ x.T).log_softmax(-1).diagonal()[:, None]


def program_of(module: nn.Module) -> tuple[BlockProgram, dict[str, Tensor]]:
    torch.manual_seed(0)
    blocks = [
        Block("before", nn.Linear(D, D), ("x",), ("h",)),
        Block("middle", module, ("h",), ("h",)),
        Block("after", nn.Linear(D, 1), ("h",), ("losses",)),
    ]
    program = BlockProgram(blocks, inputs=("x", "sample_id"), outputs=("losses",))
    return program, {"x": torch.randn(B, D), "sample_id": torch.arange(B) + 40}


def middle(module: nn.Module) -> Any:
    program, batch = program_of(module)
    return trace(program, batch, num_microbatches=1, repeats=1).blocks[1]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - x.mean(0),
        lambda x: x.softmax(0),
        lambda x: (1000 * x).softmax(0) + x,
        lambda x: x + x.argsort(0).argsort(0),
        lambda x: x * (torch.arange(B) == x[:, 0].argmax())[:, None],
        lambda x: x.cumsum(0),
        lambda x: x.clamp(max=x.max() * 0.99),
        lambda x: x / (1e6 + x.abs().amax()) * 1e6,
        capacity,
        lambda x: contrastive(x).expand(-1, D),
        lambda x: x.flip(0),
        _BackwardMean.apply,
        _BackwardNorm.apply,
        _BackwardValues.apply,
    ],
)
def test_mixing_is_found(function: Callable[[Tensor], Tensor]) -> None:
    found = middle(Apply(function))
    assert found.lineage in ("batch", "group") and found.mixes
    assert not found.stateful


def test_mixing_within_fixed_groups_is_group() -> None:
    found = middle(Apply(lambda x: x - x.view(3, 2, D).mean(1, keepdim=True).expand(3, 2, D).reshape(B, D)))
    assert found.lineage == "group"


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.GELU()),
        keyed.KeyedDropout(0.5),
        nn.BatchNorm1d(D).eval(),
        nn.Dropout(0.5).eval(),
        Apply(lambda x: x.relu_()),
        Apply(lambda x: torch.where(x > 0, x, torch.zeros_like(x)).clamp(max=1.0)),
    ],
)
def test_no_false_alarm(module: nn.Module) -> None:
    found = middle(module)
    assert (found.lineage, found.stateful, found.mixes) == ("sample", False, "")


def test_a_whole_model_is_sample() -> None:
    profile = trace(fid_program(), fid_batch(), num_microbatches=3, repeats=1)
    require_sample_lineage(profile)
    assert [b.lineage for b in profile.blocks] == ["sample"] * 6


def test_batch_norm_is_named_with_its_path_and_nothing_is_changed() -> None:
    inner = nn.Sequential(nn.Linear(D, D), nn.Sequential(nn.ReLU(), nn.BatchNorm1d(D)))
    program, batch = program_of(inner)
    before = {name: value.clone() for name, value in program.state_dict().items()}
    profile = trace(program, batch, num_microbatches=2, repeats=1)
    assert (profile.blocks[1].lineage, profile.blocks[1].stateful) == ("batch", True)
    assert all(torch.equal(value, before[name]) for name, value in program.state_dict().items())
    with pytest.raises(
        ValueError, match=r"block 'middle' mixes .* middle\.1\.1 \(BatchNorm1d\).*Freeze the batch norm"
    ):
        require_sample_lineage(profile)


def test_generator_state_and_counters_are_refused() -> None:
    program, batch = program_of(nn.Dropout(0.5))
    with pytest.raises(ValueError, match=r"generator state.*KeyedDropout"):
        require_sample_lineage(trace(program, batch, num_microbatches=1, repeats=1))

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x

    program, batch = program_of(Counter())
    with pytest.raises(ValueError, match="changes its buffers"):
        require_sample_lineage(trace(program, batch, num_microbatches=1, repeats=1))


def test_integer_inputs_are_tested_too() -> None:
    class Duplicates(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return (ids[:, None] == ids[None, :]).sum(1, keepdim=True).float()

    program = BlockProgram([Block("b", Duplicates(), ("ids",), ("losses",))], inputs=("ids",), outputs=("losses",))
    profile = trace(program, {"ids": torch.tensor([1, 2, 3, 4, 5, 6])}, num_microbatches=1, repeats=1)
    assert profile.blocks[0].lineage != "sample"
