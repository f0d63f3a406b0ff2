"""Batch norm converted: weights kept, and no sample looks at another any more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipeline import Block, BlockProgram, trace
from pipeline.conversion import batch_norm_to_group_norm, batch_norm_to_layer_norm, freeze_batch_norm
from pipeline.lineage import require_sample_lineage

SHAPES: dict[type[nn.Module], tuple[int, ...]] = {
    nn.BatchNorm1d: (4, 12),
    nn.BatchNorm2d: (4, 12, 3, 3),
    nn.BatchNorm3d: (4, 12, 2, 2, 2),
}


class Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin().flatten(1).sum(1, keepdim=True)


def trained(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    norm = kind(12)
    with torch.no_grad():
        norm.weight.normal_(), norm.bias.normal_(), norm.running_mean.normal_(), norm.running_var.uniform_(1, 2)
    return norm


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("convert", [batch_norm_to_group_norm, batch_norm_to_layer_norm, freeze_batch_norm])
def test_lineage_is_sample_afterwards(kind: type[nn.Module], convert: Callable[..., nn.Module]) -> None:
    model = nn.Sequential(nn.Identity(), nn.Sequential(trained(kind), nn.ReLU()))
    program = BlockProgram(
        [Block("norm", model, ("x",), ("h",)), Block("loss", Sum(), ("h",), ("losses",))],
        inputs=("x",), outputs=("losses",),
    )  # fmt: skip
    batch = {"x": torch.randn(SHAPES[kind])}
    with pytest.raises(ValueError, match=r"norm\.1\.0 \(BatchNorm.*batch_norm_to_group_norm.*trained again.*replicas"):
        require_sample_lineage(trace(program, batch, num_microbatches=1, repeats=1))
    weights = model[1][0].weight, model[1][0].bias
    assert convert(model) is model
    program.train()
    require_sample_lineage(trace(program, batch, num_microbatches=2, repeats=1))
    assert (model[1][0].weight, model[1][0].bias) == weights  # the same parameters


@pytest.mark.parametrize("convert", [batch_norm_to_group_norm, freeze_batch_norm])
def test_a_block_that_is_a_batch_norm_itself(convert: Callable[..., nn.Module]) -> None:
    blocks = [Block("norm", nn.BatchNorm1d(12), ("x",), ("h",)), Block("loss", Sum(), ("h",), ("losses",))]
    program = BlockProgram(blocks, inputs=("x",), outputs=("losses",))
    assert convert(program) is program
    assert program.blocks[0].module is program.get_submodule("norm")
    require_sample_lineage(trace(program, {"x": torch.randn(4, 12)}, num_microbatches=2, repeats=1))


@pytest.mark.parametrize("kind", SHAPES)
def test_frozen_is_the_original_in_eval_mode(kind: type[nn.Module]) -> None:
    norm, x = trained(kind), torch.randn(SHAPES[kind])
    right, names = norm.eval()(x), list(norm.state_dict())
    frozen = freeze_batch_norm(norm).train()
    assert torch.equal(frozen(x), right) and list(frozen.state_dict()) == names


def test_group_norm_normalises_each_group_of_a_sample() -> None:
    norm = batch_norm_to_group_norm(nn.BatchNorm2d(12), num_groups=8)  # gcd(8, 12) = 4 groups of 3 channels
    assert norm.num_groups == 4
    y = norm(torch.randn(5, 12, 4, 4) * 3 + 1).view(5, 4, -1)
    torch.testing.assert_close(y.mean(-1), torch.zeros(5, 4), atol=1e-5, rtol=0)
    torch.testing.assert_close(y.var(-1, unbiased=False), torch.ones(5, 4), atol=1e-4, rtol=0)


def test_flat_layers_get_groups_of_two_and_sharing_is_kept() -> None:
    shared = nn.BatchNorm1d(8)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.BatchNorm1d(7, affine=False))
    told: dict[str, str] = {}
    batch_norm_to_group_norm(model, num_groups=32, report=told.__setitem__)
    assert model[0] is model[2] and model[0].num_groups == 4 and model[3].num_groups == 1
    assert not list(model[3].parameters())
    assert told["0"].startswith("BatchNorm1d -> GroupNorm(4, 8, eps=1e-05") and list(told) == ["0", "2", "3"]


def test_refused() -> None:
    with pytest.raises(ValueError, match="num_groups is 0"):
        batch_norm_to_group_norm(nn.BatchNorm2d(4), num_groups=0)
    model = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match="2: LazyBatchNorm1d has no channels yet"):
        freeze_batch_norm(model)
    with pytest.raises(ValueError, match="1: BatchNorm2d has no running statistics"):
        freeze_batch_norm(model[:2])
    assert isinstance(model[0], nn.BatchNorm2d)  # nothing was changed
    with pytest.raises(ValueError, match="the module: a BatchNorm1d of one channel"):
        batch_norm_to_group_norm(nn.BatchNorm1d(1))


class NormAndActivation(nn.BatchNorm2d):
    """As timm's BatchNormAct2d."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


@pytest.mark.parametrize("convert", [batch_norm_to_group_norm, batch_norm_to_layer_norm, freeze_batch_norm])
def test_a_layer_that_does_more_than_normalise_is_refused(convert: Callable[..., nn.Module]) -> None:
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Sequential(NormAndActivation(4))).eval()
    x = torch.randn(2, 4, 3, 3)
    right = model(x)
    with pytest.raises(ValueError, match=r"1\.0: tests\..*NormAndActivation .*may do more than normalise; write it as"):
        convert(model)
    assert torch.equal(model(x), right)
