"""Keyed attention and dropout functions: torch's own apart from the mask."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import keyed
from pipeline.keyed_functional import keyed_functional
from pipeline.keyed_modules import make_keyed
from tests.pipeline.keyed_layers import E, H


def draws(function: Callable[[], Any]) -> Any:
    with keyed.scope(seed=0, step=0), keyed.block("b", ids=torch.arange(3)), keyed_functional():
        return function()


TINY = 1e-13  # so small a probability that nothing is dropped: the right value is known


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"is_causal": True},
        {"scale": 0.2},
        {"attn_mask": torch.arange(20).view(4, 5) % 3 != 0},
        {"attn_mask": torch.zeros(4, 5, dtype=torch.float64).index_fill(1, torch.tensor([2]), -float("inf"))},
        {"attn_mask": torch.arange(4)[:, None].expand(4, 5) != 1},  # a row with nothing to attend to
    ],
)
def test_attention_is_torchs_apart_from_the_mask(more: dict[str, Any]) -> None:
    q, k, v = (torch.randn(3, 2, n, 4, dtype=torch.float64).requires_grad_() for n in (4, 5, 5))
    right = functional.scaled_dot_product_attention(q, k, v, **more)
    here = draws(lambda: functional.scaled_dot_product_attention(q, k, v, dropout_p=TINY, **more))
    torch.testing.assert_close(here, right, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(y.sin().sum(), (q, k, v)) for y in (right, here)]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-10, atol=1e-11)


def test_grouped_queries() -> None:
    q = torch.randn(3, 4, 5, 4, dtype=torch.float64)
    k, v = torch.randn(2, 3, 2, 5, 4, dtype=torch.float64)
    right = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    here = draws(lambda: functional.scaled_dot_product_attention(q, k, v, dropout_p=TINY, enable_gqa=True))
    torch.testing.assert_close(here, right, rtol=1e-12, atol=1e-12)


def test_attention_weights_are_dropped_per_sample() -> None:
    """With the identity as values the output is the dropped weights: 0 or weight / (1 - p)."""
    q, k = torch.randn(2, 3, 40, 8)
    eye = torch.eye(40).expand(3, 40, 40)
    weights = (q @ k.mT / 8**0.5).softmax(-1)
    here = draws(lambda: functional.scaled_dot_product_attention(q, k, eye, dropout_p=0.25))
    zero = here == 0
    assert abs(zero.double().mean().item() - 0.25) < 5 * (0.25 * 0.75 / zero.numel()) ** 0.5
    torch.testing.assert_close(here[~zero], (weights / 0.75)[~zero])
    assert not torch.equal(zero[0], zero[1])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kdim", [None, 6])
@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_is_torchs_apart_from_the_mask(
    batch_first: bool, kdim: int | None, need_weights: bool
) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, H, dropout=TINY, batch_first=batch_first, kdim=kdim, vdim=kdim).double()
    other = make_keyed(copy.deepcopy(module))
    q, kv = torch.randn(3, 4, E).double(), torch.randn(3, 5, kdim or E).double()
    if not batch_first:
        q, kv = q.transpose(0, 1), kv.transpose(0, 1)
    padding = torch.tensor([[False] * 5, [False] * 4 + [True], [True] + [False] * 4])
    mask = torch.zeros(4, 5, dtype=torch.float64).index_fill(1, torch.tensor([2]), -1.5)
    module.dropout = 0.0
    for more in ({}, {"key_padding_mask": padding}, {"attn_mask": mask, "key_padding_mask": padding.double() * -1e9}):
        right = module(q, kv, kv, need_weights=need_weights, **more)  # type: ignore[arg-type]
        with keyed.scope(seed=0, step=0), keyed.block("b", ids=torch.arange(3)):
            here = other(q, kv, kv, need_weights=need_weights, **more)
        torch.testing.assert_close(here, right, rtol=1e-11, atol=1e-11)


def test_functional_multihead_attention_takes_boolean_masks() -> None:
    m = nn.MultiheadAttention(E, H).double()
    q, kv = torch.randn(4, 3, E).double(), torch.randn(5, 3, E).double()
    masks = {
        "key_padding_mask": torch.tensor([[False] * 5, [False] * 4 + [True], [True] + [False] * 4]),
        "attn_mask": torch.zeros(4, 5, dtype=torch.bool).index_fill(1, torch.tensor([2]), True),
    }

    def attend(p: float) -> Tensor:
        projections = (m.in_proj_weight, m.in_proj_bias, None, None, False, p, m.out_proj.weight, m.out_proj.bias)
        return functional.multi_head_attention_forward(q, kv, kv, E, H, *projections, training=True, **masks)[0]

    torch.testing.assert_close(draws(lambda: attend(TINY)), attend(0.0), rtol=1e-11, atol=1e-11)


def test_alpha_dropout_is_refused_and_what_is_off_draws_nothing() -> None:
    with pytest.raises(RuntimeError, match="alpha_dropout draws from generator state"):
        draws(lambda: functional.alpha_dropout(torch.ones(3, 4), training=True))
    assert torch.equal(draws(lambda: functional.alpha_dropout(torch.ones(3, 4))), torch.ones(3, 4))
    assert torch.equal(draws(lambda: functional.dropout(torch.ones(3, 4), training=False)), torch.ones(3, 4))
