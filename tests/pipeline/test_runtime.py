"""Real gloo ranks against one process that runs the whole batch without any library."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline import Pipeline, Plan
from pipeline.verify import gradient_report, whole_batch_gradients
from tests.distributed import run_on_ranks
from tests.pipeline.fid_program import fid_batch, fid_program

CUTS = {1: [[]], 2: [[1], [3], [5]], 3: [[2, 4], [1, 5]]}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def _step(
    cuts: list[int], schedule: str, dtype: torch.dtype, release: bool = False, num_microbatches: int = 3
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor | None, dict[str, Tensor], frozenset[str]]:
    """Two steps of different shapes, then the first again; gradients of that one."""
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
    pipeline.check_ties()
    grads = {n: p.grad for n, p in pipeline.parameters_here.items() if p.grad is not None}
    assert set(grads) == set(pipeline.parameters_here)
    everywhere = result.outputs_everywhere()
    assert (result.outputs is not None) == (pipeline.stage == pipeline.num_stages - 1)
    leaf = batch["scores"].grad
    return grads, everywhere, leaf, {"scores": leaf} if leaf is not None else {}, pipeline.owned


def _all_layouts(num_stages: int) -> dict[str, tuple]:
    results = {}
    for cuts in CUTS[num_stages]:
        for schedule in ("gpipe", "1f1b"):
            for dtype in (torch.float64, torch.float32):
                for release in (False, True):
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
