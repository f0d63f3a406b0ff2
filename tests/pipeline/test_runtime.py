"""Real gloo ranks against one process that runs the whole batch without any library."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline import Block, BlockProgram, Pipeline, Plan
from pipeline.verify import gradient_report, whole_batch_gradients
from tests.distributed import run_on_ranks
from tests.pipeline.fid_program import fid_batch, fid_program

CUTS = {1: [[]], 2: [[1], [3], [5]], 3: [[2, 4], [1, 5]]}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def _step(
    cuts: list[int], schedule: str, dtype: torch.dtype, release: bool = False, num_microbatches: int = 3
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor | None, dict[str, Tensor], frozenset[str]]:
    """Two steps of different shapes and an evaluation, then the first again; gradients of that one."""
    program, batch = fid_program(dtype=dtype), fid_batch(dtype=dtype)
    plan = Plan.from_cuts(program, cuts, schedule=schedule, num_microbatches=num_microbatches)
    pipeline = Pipeline(program, plan, timeout_s=30)
    if release:
        pipeline.release_other_stages()
    for shapes in ({}, {"length": 7}, {}):
        batch = fid_batch(dtype=dtype, **shapes)
        for parameter in pipeline.parameters_here.values():
            parameter.grad = None
        result = pipeline.step(batch, seed=3, step=5)
        if shapes:
            program.eval()
            evaluated = pipeline.forward(batch, seed=3, step=5).outputs_everywhere()["losses"]
            assert evaluated.shape[0] == 6 and evaluated.isfinite().all()
            program.train()
    pipeline.check_ties()
    grads = {n: p.grad for n, p in pipeline.parameters_here.items() if p.grad is not None}
    assert set(grads) == set(pipeline.parameters_here)
    everywhere = result.outputs_everywhere()
    assert (result.outputs is not None) == (pipeline.has_last_stage)
    leaf = batch["scores"].grad
    return grads, everywhere, leaf, {"scores": leaf} if leaf is not None else {}, pipeline.owned


def _all_layouts(num_stages: int) -> dict[str, tuple]:
    results = {}
    for i, cuts in enumerate(CUTS[num_stages]):
        for schedule in ("gpipe", "1f1b"):
            for dtype in (torch.float64, torch.float32)[: 2 if i == 0 else 1]:
                release = schedule == "1f1b"
                results[f"{cuts} {schedule} {dtype} {release}"] = (
                    dtype,
                    *_step(cuts, schedule, dtype, release),
                )
    return results


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_gradients_equal_one_device_running_the_whole_batch(num_stages: int) -> None:
    ranks = [_all_layouts(1)] if num_stages == 1 else run_on_ranks(_all_layouts, num_stages, num_stages)
    twins = {}
    for dtype in TOLERANCE:
        twins[dtype] = whole_batch_gradients(fid_program(dtype=dtype), fid_batch(dtype=dtype), seed=3, step=5)
    for layout in ranks[0]:
        seen, owned = {}, []
        for rank in ranks:
            dtype, grads, outputs, leaf, leaves, owns = rank[layout]
            report = gradient_report(twins[dtype].gradients, grads, tolerance=TOLERANCE[dtype])
            assert report, f"{layout}: {report.message}"
            seen.update(grads)
            owned += sorted(owns)
            for name, right in twins[dtype].outputs.items():
                torch.testing.assert_close(outputs[name], right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
            # Only the last stage reads the scores.
            assert (leaf is not None) == (rank is ranks[-1])
            report = gradient_report(twins[dtype].input_gradients, leaves, tolerance=TOLERANCE[dtype])
            assert report, f"{layout}: {report.message}"
        assert set(seen) == set(twins[dtype].gradients)
        assert sorted(owned) == sorted(seen), "each parameter counts once in the norm"


class _Wrong(nn.Module):
    """Generator-state dropout: what the parity test must catch."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5)


@pytest.mark.parametrize("wrong", ["nothing", "mean of means", "generator dropout"])
def test_the_comparison_can_fail(wrong: str) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop = nn.Linear(4, 1), _Wrong()

        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            y = self.layer(self.drop(x) if wrong == "generator dropout" else x) ** 2 * weight[:, None]
            return y / weight.sum() if wrong == "mean of means" else y

    torch.manual_seed(0)
    program = BlockProgram(
        [Block("loss", Loss(), ("x", "weight"), ("losses",))], inputs=("x", "weight"), outputs=("losses",)
    )
    batch = {"x": torch.randn(6, 4), "weight": torch.rand(6)}
    twin = whole_batch_gradients(program, batch, seed=0, step=0)
    pipeline = Pipeline(program, Plan.from_cuts(program, [], num_microbatches=3))
    pipeline.step(batch, seed=0, step=0)
    grads = {name: p.grad for name, p in pipeline.parameters_here.items() if p.grad is not None}
    report = gradient_report(twin.gradients, grads, tolerance=1e-5)
    assert bool(report) == (wrong == "nothing")
    assert report.worst in report.message


def test_gradients_accumulate_and_reach_through_a_graph() -> None:
    program, batch = fid_program(), fid_batch()
    twin = whole_batch_gradients(program, batch, seed=0, step=0)
    root = batch["scores"].detach().requires_grad_()
    batch["scores"] = root * 1.0  # not a leaf: its graph must be walked once, not once a micro-batch
    pipeline = Pipeline(program, Plan.from_cuts(program, [], num_microbatches=2))
    for _ in range(2):
        pipeline.step({**batch, "scores": root * 1.0}, seed=0, step=0)
    assert root.grad is not None
    torch.testing.assert_close(root.grad, 2 * twin.input_gradients["scores"])
    grads = {n: p.grad / 2 for n, p in pipeline.parameters_here.items() if p.grad is not None}
    assert gradient_report(twin.gradients, grads, tolerance=1e-10)


def _accumulate_tied() -> float:
    program = fid_program()
    pipeline = Pipeline(program, Plan.from_cuts(program, [2], num_microbatches=2), timeout_s=30)
    pipeline.step(fid_batch(), seed=3, step=5)
    table = pipeline.parameters_here["embed.table.weight"]
    assert table.grad is not None
    once = table.grad.clone()
    pipeline.step(fid_batch(), seed=3, step=5)
    return (table.grad - 2 * once).abs().max().item()


def _bad_batch(kind: str) -> str:
    program = fid_program()
    pipeline = Pipeline(program, Plan.from_cuts(program, [2], num_microbatches=4, schedule="gpipe"), timeout_s=30)
    batch = fid_batch(6) if kind == "uneven" else fid_batch(8)
    if kind == "missing" and pipeline.rank == 1:
        del batch["labels"]
    if kind == "differs" and pipeline.rank == 1:
        batch = fid_batch(12)
    with pytest.raises(ValueError) as error:
        pipeline.step(batch, seed=0, step=0)
    return str(error.value)


def _frozen_first_stage() -> list[str]:
    program = fid_program()
    for block in program.blocks[:3]:
        block.module.requires_grad_(False)
    twin = whole_batch_gradients(program, fid_batch(), seed=3, step=5)
    pipeline = Pipeline(program, Plan.from_cuts(program, [2], num_microbatches=3), timeout_s=30)
    pipeline.step(fid_batch(), seed=3, step=5)
    grads = {n: p.grad for n, p in pipeline.parameters_here.items() if p.grad is not None}
    assert gradient_report(twin.gradients, grads, tolerance=1e-10)
    return sorted(grads)


def _ties_drift() -> str:
    program = fid_program()
    pipeline = Pipeline(program, Plan.from_cuts(program, [2], num_microbatches=2), timeout_s=30)
    if pipeline.rank == 1:
        with torch.no_grad():
            pipeline.parameters_here["embed.table.weight"][0, 0] += 1e-6
    with pytest.raises(RuntimeError) as error:
        pipeline.check_ties()
    return str(error.value)


def _on_two_ranks() -> dict[str, object]:
    return {
        "accumulate": _accumulate_tied(),
        "bad": {kind: _bad_batch(kind) for kind in ("uneven", "missing", "differs")},
        "frozen": _frozen_first_stage(),
        "drift": _ties_drift(),
    }


def test_two_ranks_agree_on_errors_ties_and_frozen_stages() -> None:
    first, second = run_on_ranks(_on_two_ranks, 2)
    assert first["accumulate"] < 1e-12 and second["accumulate"] < 1e-12
    for rank in (first, second):
        assert "6 samples does not divide into 4 micro-batches" in rank["bad"]["uneven"]
        assert "lacks input 'labels'" in rank["bad"]["missing"]
        assert "rank 1" in rank["bad"]["differs"]
        assert "embed.table.weight" in rank["drift"]
    assert first["frozen"] == [] and "head.temperature" in second["frozen"]


def _stall() -> tuple[float, str]:
    program = fid_program()
    pipeline = Pipeline(program, Plan.from_cuts(program, [2], num_microbatches=2), timeout_s=2)
    pipeline.step(fid_batch(), seed=0, step=0)
    if pipeline.rank == 1:
        program.blocks[3].module.register_forward_hook(lambda *_: time.sleep(6))
    start = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        pipeline.step(fid_batch(), seed=0, step=0)
    return time.monotonic() - start, str(error.value)


def test_a_rank_that_stalls_is_given_up_after_the_timeout() -> None:
    (waited, message), _ = run_on_ranks(_stall, 2, timeout_s=60)
    assert 1.5 < waited < 14 and ("imed out" in message or "imeout" in message)


def _two_replicas() -> float:
    """Replicas 0 and 1 of two stages each: groups of two out of four ranks."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replica = dist.get_rank() // 2
    program = fid_program()
    plan = Plan.from_cuts(program, [3], num_microbatches=2)
    pipeline = Pipeline(program, plan, group=groups[replica], timeout_s=30)
    whole = fid_batch(8)
    share = {n: t.detach().chunk(2)[replica].requires_grad_(t.requires_grad) for n, t in whole.items()}
    pipeline.step(share, seed=3, step=5)
    twin = whole_batch_gradients(program, whole, seed=3, step=5)
    grads = {}
    for name in twin.gradients:  # sum over replicas of what the owners hold
        mine = pipeline.parameters_here[name].grad if name in pipeline.owned else None
        grads[name] = torch.zeros_like(twin.gradients[name]) if mine is None else mine.clone()
        dist.all_reduce(grads[name])
    return gradient_report(twin.gradients, grads, tolerance=1e-10).worst_error


def test_two_replicas_of_two_stages_sum_to_the_whole_batch() -> None:
    assert max(run_on_ranks(_two_replicas, 4)) < 1e-10


def _one_rank_dies() -> None:
    program = fid_program()
    pipeline = Pipeline(program, Plan.from_cuts(program, [2], num_microbatches=2), timeout_s=5)
    if pipeline.rank == 1:
        raise ArithmeticError("on purpose")
    pipeline.step(fid_batch(), seed=0, step=0)


def test_a_rank_s_exception_surfaces() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 failed(.|\n)*on purpose"):
        run_on_ranks(_one_rank_dies, 2)


def test_mistakes() -> None:
    program = fid_program()
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialised"):
        Pipeline(program, Plan.from_cuts(program, [2], num_microbatches=2))
    with pytest.raises(ValueError, match="1f1b needs at least as many"):
        Pipeline(program, Plan.from_cuts(program, [2], num_microbatches=2), num_microbatches=1)
    with pytest.raises(ValueError, match="does not divide"):
        Pipeline(program, Plan.from_cuts(program, [], num_microbatches=4)).step(fid_batch(), seed=0, step=0)
