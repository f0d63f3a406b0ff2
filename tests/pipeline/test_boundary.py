"""What crosses a cut: contiguous both ways, and safe to work on in place.

Each guard of `pipeline.boundary` by itself: on real ranks autograd happens to make a leaf's gradient contiguous
(torch 2.14), so a run over gloo does not notice whether the boundary did.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline.boundary import boundary


def test_the_gradient_is_contiguous() -> None:
    seen: list[Tensor] = []
    leaf = torch.randn(2, 3, 4, requires_grad=True)
    x = leaf * 1.0
    x.register_hook(seen.append)
    (boundary(x).transpose(1, 2).contiguous() ** 2).sum().backward()
    assert seen[0].is_contiguous() and seen[0].shape == (2, 3, 4)
    torch.testing.assert_close(leaf.grad, 2 * leaf.detach())


@pytest.mark.parametrize("requires_grad", [True, False])
def test_the_value_is_contiguous(requires_grad: bool) -> None:
    x = torch.randn(2, 3, 4).transpose(1, 2).requires_grad_(requires_grad)
    y = boundary(x)
    assert y.is_contiguous() and torch.equal(y, x) and y.requires_grad == requires_grad


def test_a_received_leaf_may_be_worked_on_in_place() -> None:
    leaf = torch.randn(3, requires_grad=True)
    boundary(leaf).relu_().sum().backward()
    assert leaf.grad is not None
