"""Losses against loops, and that they do not depend on how the batch is split."""

from __future__ import annotations

import pytest
import torch

from pipeline.adapters import SquaredError, TokenLoss, next_token_targets


def test_token_loss_against_a_loop() -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 7, generator=g, dtype=torch.float64)
    target = torch.randint(7, (3, 4), generator=g)
    weight = torch.rand(3, 4, generator=g, dtype=torch.float64)
    right = torch.zeros(3, 1, dtype=torch.float64)
    for b in range(3):
        for t in range(4):
            right[b] -= weight[b, t] * logits[b, t].log_softmax(0)[target[b, t]]
    found = TokenLoss()(logits, target, weight)
    torch.testing.assert_close(found, right)
    parts = [TokenLoss()(logits[i : i + 1], target[i : i + 1], weight[i : i + 1]) for i in range(3)]
    assert torch.equal(torch.cat(parts), found)


def test_squared_error_by_hand() -> None:
    features, target = torch.tensor([[1.0, 2.0], [0.0, 3.0]]), torch.tensor([[0.0, 2.0], [2.0, 0.0]])
    assert SquaredError()(features, target, torch.tensor([0.5, 1.0])).tolist() == [[0.5], [13.0]]


def test_targets_skip_padding_on_either_side() -> None:
    ids = torch.tensor([[0, 5, 6, 7], [8, 9, 0, 0]])
    target, weight = next_token_targets(ids, attention_mask=(ids > 0).long(), denominator=10)
    assert (weight * 10).round().tolist() == [[0, 1, 1, 0], [1, 0, 0, 0]]
    assert target[0, 1] == 6 and target[0, 2] == 7 and target[1, 0] == 9
    assert next_token_targets(ids)[1].sum() == pytest.approx(1.0)


def test_nothing_to_predict_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one counted position"):
        next_token_targets(torch.ones(2, 1, dtype=torch.long))
