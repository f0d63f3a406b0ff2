"""Every adapter's program against the model's own forward and backward, in float64."""

from __future__ import annotations

import pytest
import torch

from pipeline.adapters import original_names
from pipeline.boundary import Shape, carry_shapes
from pipeline.verify import gradient_report, whole_batch_gradients
from tests.pipeline.adapters.models import CASES, Case, drawn, in_stages, model_gradients, probe

every_case = pytest.mark.parametrize("case", CASES, ids=str)


@every_case
def test_outputs_are_the_model_s_own(case: Case) -> None:
    model, batch = drawn(case.make()), case.batch()
    right, found = case.outputs(model, batch), case.program(model)(batch)
    assert list(found) == list(right)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, right[name], rtol=0, atol=1e-11)


@every_case
def test_any_cut_gives_equal_outputs_whether_tables_are_sent_or_computed_again(case: Case) -> None:
    model, batch = drawn(case.make()), case.batch()
    program = case.program(model)
    whole = program(batch)
    tables = [block.name for block in program.blocks if block.recomputable]
    for cut in range(1, len(program.blocks)):
        for recomputed in ((), tables):
            parts = in_stages(program, batch, (cut,), recomputed=recomputed)
            assert all(torch.equal(parts[name], whole[name]) for name in whole), (cut, recomputed)


@every_case
def test_halves_of_the_batch_give_halves_of_the_outputs(case: Case) -> None:
    """The axes are right: nothing depends on the other samples, and tables without a sample axis stay whole."""
    model, batch = drawn(case.make()), case.batch()
    program = case.program(model)
    whole, num_parts = program(batch), 3
    assert {tensor.shape[0] for tensor in whole.values()} == {program.num_samples(batch)}
    parts = [program(program.microbatch(batch, i, num_parts)) for i in range(num_parts)]
    for name in whole:
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), whole[name], rtol=0, atol=1e-11)


@every_case
def test_gradients_are_those_of_the_model(case: Case) -> None:
    model, batch = drawn(case.make()), case.batch()
    outputs = case.outputs(model, batch)
    rows = next(iter(outputs.values())).shape[0]
    batch["sample_weight"] = torch.linspace(0.1, 0.4, rows, dtype=torch.float64)
    loss = probe(outputs)
    right = model_gradients(model, loss.module(*outputs.values(), batch["sample_weight"]).sum())
    program = case.program(model, with_loss=loss)
    found = whole_batch_gradients(program, batch, seed=0, step=0)
    names = original_names(program, model)
    report = gradient_report(right, {names[n][0]: g for n, g in found.gradients.items()}, tolerance=1e-10)
    assert report, report.message
    assert {name for name, g in right.items() if g.any()} <= {names[n][0] for n in found.gradients}


@every_case
def test_shapes_of_the_carry_are_known_without_data(case: Case) -> None:
    """The runtime finds them on fake tensors, where nothing may depend on values (transformers' own masks do)."""
    model, batch = drawn(case.make()), case.batch()
    program = case.program(model)
    num_blocks = len(program.blocks)
    bounds = [(i, i + 1) for i in range(num_blocks)]
    micro = {name: Shape.of(tensor) for name, tensor in batch.items()}
    shapes = carry_shapes(program, bounds, micro, device=torch.device("cpu"))
    env: dict[str, torch.Tensor] = dict(batch)
    for cut in range(1, num_blocks + 1):
        env = {**batch, **program.run(env, cut - 1, cut)}
        assert {n: s.size for n, s in shapes[cut - 1].items()} == {n: tuple(env[n].shape) for n in program.carry(cut)}


@every_case
def test_the_program_holds_the_model_s_own_parameters(case: Case) -> None:
    model = case.make()
    before = {name: p.clone() for name, p in model.named_parameters()}
    program = case.program(model.eval())
    assert not program.training
    own = {id(p): name for name, p in model.named_parameters()}
    assert all(id(p) in own for p in program.parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
