"""Statistics over ranks against torch's own batch norm on the whole batch, in one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline import Block, BlockProgram, Pipeline, Plan
from pipeline.conversion import synchronise_batch_norm
from pipeline.hoist import Tower
from pipeline.verify import gradient_report, whole_batch_gradients
from tests.distributed import run_on_ranks

C = 4


class Loss(nn.Module):
    def forward(self, h: Tensor, weight: Tensor) -> Tensor:
        return h.sin().flatten(1).sum(1, keepdim=True) * weight[:, None]


def program() -> BlockProgram:
    torch.manual_seed(0)
    norms = [nn.BatchNorm2d(C), nn.BatchNorm2d(C, momentum=None), nn.BatchNorm2d(C, affine=False)]
    blocks = [
        Block("first", nn.Sequential(nn.Conv2d(2, C, 3, bias=False), norms[0], nn.GELU()), ("x",), ("h",)),
        Block("second", nn.Sequential(nn.Conv2d(C, C, 3, bias=False), norms[1], nn.GELU(), norms[2]), ("h",), ("h",)),
        Block("loss", Loss(), ("h", "weight"), ("losses",)),
    ]
    with torch.no_grad():
        for norm in norms[:2]:
            norm.weight.normal_(), norm.bias.normal_()
    return BlockProgram(blocks, inputs=("x", "weight"), outputs=("losses",)).double()


def batch() -> dict[str, Tensor]:
    """Eight pictures far from 0, where sums of squares lose digits."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(8, 2, 7, 7, generator=g, dtype=torch.float64) + 50.0
    return {"x": x.requires_grad_(), "weight": torch.rand(8, generator=g, dtype=torch.float64) / 8}


def right() -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Gradients, buffers after one step, and what evaluation then gives, of torch's layers."""
    whole = program()
    twin = whole_batch_gradients(whole, batch(), seed=0, step=0)
    with torch.no_grad():
        evaluated = whole.eval().run(batch())["losses"]
    return {**twin.gradients, **twin.input_gradients}, dict(whole.named_buffers()), evaluated


def check(gradients: dict[str, Tensor], buffers: dict[str, Tensor], evaluated: Tensor) -> None:
    wanted, statistics, losses = right()
    report = gradient_report(wanted, gradients, tolerance=1e-10)
    assert report and report.num_compared == len(wanted), report.message
    for name, value in statistics.items():
        torch.testing.assert_close(buffers[name], value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(evaluated, losses, rtol=1e-10, atol=1e-12)


def _replicas(num_stages: int) -> dict[str, dict[str, Tensor]]:
    """Two replicas of one or two stages: this rank's summed gradients, and its stage's buffers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    replica, stage = divmod(rank, num_stages)
    pipelines = [dist.new_group([r * num_stages + s for s in range(num_stages)]) for r in range(2)]
    replicas = [dist.new_group([r * num_stages + s for r in range(2)]) for s in range(num_stages)]
    whole = program()
    synchronise_batch_norm(whole, num_microbatches=1, group=replicas[stage])
    plan = Plan.from_cuts(whole, [1] if num_stages == 2 else [], schedule="gpipe")
    pipeline = Pipeline(whole, plan, group=pipelines[replica], timeout_s=30)
    share = {n: t.detach().chunk(2)[replica].requires_grad_(t.requires_grad) for n, t in batch().items()}
    pipeline.step(share, seed=0, step=0)
    gradients = {}
    for name, parameter in pipeline.parameters_here.items():
        assert parameter.grad is not None
        gradients[name] = parameter.grad
        dist.all_reduce(parameter.grad, group=replicas[stage])
    if share["x"].grad is not None:
        parts = [torch.empty_like(share["x"]) for _ in range(2)]
        dist.all_gather(parts, share["x"].grad, group=replicas[stage])
        gradients["x"] = torch.cat(parts)
    here = {f"{b.name}.": b for s in pipeline.stages_here for b in whole.blocks[slice(*plan.bounds()[s])]}
    buffers = {n: b for n, b in whole.named_buffers() if n.startswith(tuple(here))}
    assert size == 2 * num_stages
    return {"gradients": gradients, "buffers": buffers}


@pytest.mark.parametrize("num_stages", [1, 2])
def test_replicas_of_one_micro_batch_are_the_whole_batch(num_stages: int) -> None:
    ranks = run_on_ranks(_replicas, 2 * num_stages, num_stages)
    gradients, buffers = {}, {}
    for rank in ranks[:num_stages]:
        gradients |= rank["gradients"]
        buffers |= rank["buffers"]
    model = synchronise_batch_norm(program(), num_microbatches=1).eval()
    model.load_state_dict({**model.state_dict(), **buffers})
    with torch.no_grad():
        evaluated = model.run(batch())["losses"]  # type: ignore[operator]
    check(gradients, buffers, evaluated)


def test_one_process_is_torchs_own() -> None:
    model = synchronise_batch_norm(program(), num_microbatches=1)
    assert isinstance(model, BlockProgram) and list(model.state_dict()) == list(program().state_dict())
    found = whole_batch_gradients(model, batch(), seed=0, step=0)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        evaluated = model.eval().run(batch())["losses"]
    check({**found.gradients, **found.input_gradients}, buffers, evaluated)


def test_without_the_other_ranks_it_would_be_another_model() -> None:
    """What the tests above would see if nothing were sent."""
    model, halves = program(), []
    for half in range(2):
        share = {n: t.detach().chunk(2)[half] for n, t in batch().items()}
        halves.append(whole_batch_gradients(copy.deepcopy(model), share, seed=0, step=0).gradients)
    wrong = {name: halves[0][name] + halves[1][name] for name in halves[0]}
    assert gradient_report(right()[0], wrong, tolerance=1e-10).worst_error > 1e-2


def test_a_hoisted_block_moves_its_statistics_once() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(3).double()
    block = Block("norm", norm, ("x",), ("y",))
    tower_program = BlockProgram([block], inputs=("x",), outputs=("y",))
    synchronise_batch_norm(tower_program, num_microbatches=1)
    tower = Tower(tower_program, Plan.from_cuts(tower_program, []))
    x, twin = torch.randn(6, 3, dtype=torch.float64), nn.BatchNorm1d(3).double()
    given = torch.randn(6, 3, dtype=torch.float64)
    torch.testing.assert_close(tower.embed({"x": x}, seed=0, step=0)["y"], twin(x))
    tower.backward({"x": x}, {"y": given}, seed=0, step=0)
    twin.zero_grad()
    copy.deepcopy(twin)(x).backward(given)
    state = tower_program.blocks[0].module.state_dict()
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(state[name], value)
    assert norm.weight.grad is not None and norm.weight.grad.abs().sum() > 0


def test_several_micro_batches_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"num_microbatches is 4; .* needs 1: the first .* before the others exist"):
        synchronise_batch_norm(program(), num_microbatches=4)


def test_statistics_of_one_value_are_refused_as_torch_does() -> None:
    """Its variance is 0 and the tracked one 0 / 0; torch raises as well."""
    norm = synchronise_batch_norm(nn.BatchNorm1d(C), num_microbatches=1)
    with pytest.raises(ValueError, match="more than one value a channel"):
        norm(torch.randn(1, C))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        nn.BatchNorm1d(C)(torch.randn(1, C))
    assert norm.running_var.isfinite().all()
    assert norm.eval()(torch.randn(1, C)).isfinite().all()
