"""Adapters' programs on real ranks: gradients against the model's own, tables sent or computed again."""

from __future__ import annotations

import pytest
import torch

from pipeline import Pipeline, Plan
from pipeline.adapters import original_names
from pipeline.verify import gradient_report
from tests.distributed import run_on_ranks
from tests.pipeline.adapters.models import CASES, drawn, model_gradients, probe


def gradients_on_a_rank(name: str, cuts: list[int], schedule: str, num_microbatches: int, again: bool) -> str:
    """The report on this rank's gradients, or "" if all are right."""
    torch.manual_seed(0)
    case = next(case for case in CASES if case.name == name)
    model, batch = drawn(case.make()), case.batch()
    outputs = case.outputs(model, batch)
    rows = next(iter(outputs.values())).shape[0]
    batch["sample_weight"] = torch.linspace(0.1, 0.4, rows, dtype=torch.float64)
    loss = probe(outputs)
    right = model_gradients(model, loss.module(*outputs.values(), batch["sample_weight"]).sum())
    program = case.program(model, with_loss=loss)
    names = original_names(program, model)
    tables = [block.name for block in program.blocks if block.recomputable] if again else []
    plan = Plan.from_cuts(program, cuts, schedule=schedule, num_microbatches=num_microbatches, recomputed=tables)
    pipeline = Pipeline(program, plan, timeout_s=60)
    pipeline.release_other_stages()  # masks and tables still know the type of weights that are elsewhere
    pipeline.step({n: batch[n] for n in pipeline.inputs_here}, seed=0, step=0)
    here = {n: p.grad for n, p in pipeline.parameters_here.items() if p.grad is not None}
    missing = [n for n, p in pipeline.parameters_here.items() if p.grad is None and right[names[n][0]].any()]
    report = gradient_report(right, {names[n][0]: g for n, g in here.items()}, tolerance=1e-10)
    return f"no gradient: {missing}" if missing else ("" if report and here else report.message)


@pytest.mark.parametrize("again", [False, True], ids=["sent", "again"])
@pytest.mark.parametrize(
    ("name", "cuts", "schedule", "num_microbatches"),
    [
        ("llama", [4], "1f1b", 3),  # a tie over the cut, rotary tables read on both sides of it
        ("fid-padded", [5, 11], "gpipe", 3),  # biases with gradients, pairs, an embedding tied over three stages
    ],
)
def test_gradients_are_those_of_the_model(
    name: str, cuts: list[int], schedule: str, num_microbatches: int, again: bool
) -> None:
    found = run_on_ranks(gradients_on_a_rank, len(cuts) + 1, name, cuts, schedule, num_microbatches, again)
    assert not any(found), found
