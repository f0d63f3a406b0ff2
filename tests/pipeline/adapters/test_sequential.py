"""``nn.Sequential`` as a program: one block a child, repeated and nested children included."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from pipeline.adapters import program_of, sequential, squared_error
from pipeline.verify import whole_batch_gradients

X = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))


def nested() -> nn.Sequential:
    torch.manual_seed(0)
    shared = nn.Linear(5, 5)
    inner = nn.Sequential(OrderedDict(first=nn.Linear(5, 7), act=nn.Tanh(), second=nn.Linear(7, 5)))
    return nn.Sequential(shared, inner, nn.ReLU(), shared, nn.Linear(5, 3))


@pytest.mark.parametrize("flatten", [False, True])
def test_the_program_is_the_model(flatten: bool) -> None:
    model = nested()
    program = sequential(model, flatten=flatten)
    assert torch.equal(program({"x": X})["y"], model(X))
    inner = ["layer.1.first", "layer.1.act", "layer.1.second"] if flatten else ["layer.1"]
    assert [b.name for b in program.blocks] == ["layer.0", *inner, "layer.2", "layer.3", "layer.4"]
    assert program.blocks[0].module is program.blocks[-2].module is model[0]  # listed twice, as it runs twice


def test_a_single_child_and_names_of_the_user() -> None:
    program = sequential(nn.Sequential(nn.Linear(5, 2)), input="image", output="features")
    assert (program.inputs, program.outputs) == (("image",), ("features",))


def test_the_loss_is_a_last_block_and_its_other_reads_are_inputs() -> None:
    model = nested()
    program = program_of(model, with_loss=squared_error("y"), sample_id=True)
    assert program.inputs == ("sample_id", "x", "target", "sample_weight") and program.outputs == ("losses",)
    batch = {"sample_id": torch.arange(4), "x": X, "target": torch.ones(4, 3), "sample_weight": torch.full((4,), 0.25)}
    found = whole_batch_gradients(program, batch, seed=0, step=0)
    loss = (model(X) - 1.0).square().sum() / 4
    loss.backward()
    torch.testing.assert_close(found.loss, loss.detach())
    torch.testing.assert_close(found.gradients["layer.0.weight"], model[0].weight.grad)


class Twice(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sequential(nn.Sequential()), "has no children"),
        (lambda: sequential(nested(), input="hidden"), "must be three names"),
        (lambda: sequential(Twice(nn.Linear(5, 5))), "Twice overrides forward of Sequential"),
        (lambda: sequential(nn.Sequential(Twice(nn.Linear(5, 5))), flatten=True), "Twice overrides forward"),
        (lambda: sequential(nested(), with_loss=squared_error("z")), "none of the model's outputs.*one of: y"),
    ],
)
def test_what_cannot_be_listed_is_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
