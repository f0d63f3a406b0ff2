"""Padding changes no gradient and no output of the real samples."""

from __future__ import annotations

import pytest
import torch

from pipeline import Pipeline, Plan
from pipeline.padding import pad_batch
from pipeline.verify import gradient_report, whole_batch_gradients
from tests.pipeline.fid_program import K, fid_batch, fid_program


@pytest.mark.parametrize("num_samples", [5, 6, 7, 8])
def test_padded_gradients_are_those_of_the_batch(num_samples: int) -> None:
    program, batch = fid_program(), fid_batch(num_samples)
    right = whole_batch_gradients(program, batch, seed=0, step=0)
    padded = pad_batch(program, batch, multiple=4, weights=("weight",))
    assert padded["weight"].shape == (8,) and padded["passages"].shape[0] == 8 * K
    assert padded["weight"].sum().item() == pytest.approx(1.0)
    pipeline = Pipeline(program, Plan.from_cuts(program, [], num_microbatches=4))
    result = pipeline.step(padded, seed=0, step=0)
    grads = {n: p.grad for n, p in pipeline.parameters_here.items() if p.grad is not None}
    report = gradient_report(right.gradients, grads, tolerance=1e-10)
    assert report, report.message
    assert batch["scores"].grad is not None  # through the concatenation
    torch.testing.assert_close(batch["scores"].grad, right.input_gradients["scores"])
    torch.testing.assert_close(result.outputs_everywhere()["losses"][:num_samples], right.outputs["losses"])


def test_forgetting_the_weight_is_seen_in_the_gradient() -> None:
    program, batch = fid_program(), fid_batch(5)
    right = whole_batch_gradients(program, batch, seed=0, step=0)
    wrong = whole_batch_gradients(program, pad_batch(program, batch, multiple=4, weights=()), seed=0, step=0)
    assert not gradient_report(right.gradients, wrong.gradients, tolerance=1e-3)


def test_mistakes() -> None:
    program = fid_program()
    with pytest.raises(ValueError, match=r"names 'weights', which is no input \(did you mean 'weight'"):
        pad_batch(program, fid_batch(), multiple=4, weights=("weights",))
    with pytest.raises(ValueError, match="multiple is 0"):
        pad_batch(program, fid_batch(), multiple=0, weights=("weight",))
