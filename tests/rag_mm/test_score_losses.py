"""Scales, temperatures and statistics of the objectives that look at scores, against plain formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rag_mm.objectives import DISTILLED, READER_OBJECTIVES, ObjectivesConfig
from rag_mm.reader.score_losses import Worth, score_losses, statistic_names

OFF = ObjectivesConfig(generation=0.0, pdist=0.0, contrastive=0.0)
B, K, T, WIDTH = 3, 4, 2, 16


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


PRODUCT, TARGETS = rand(B, K, seed=0), torch.tensor([[0.3, 0.2], [0.2, 0.0], [0.3, 0.0]], dtype=torch.float64)
SAMPLE = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
LOG_P = (rand(B, K, T, seed=1) - 3) * (TARGETS > 0).unsqueeze(1)
WORTH = Worth(LOG_P, LOG_P * 2, LOG_P * 3, rand(B * K, 1, seed=2))


def run(objective: ObjectivesConfig, **weights: Any) -> tuple[Tensor, dict[str, Tensor]]:
    given = {"sample_weight_B": SAMPLE, "distill_weight_B": SAMPLE, "target_weight_BT": TARGETS, **weights}
    found, seen = score_losses(objective, PRODUCT, WORTH, width=WIDTH, **given)
    return torch.stack(found, 1), dict(zip(statistic_names(objective)[3:], seen, strict=True))


def test_the_presets_that_the_guide_gives_for_atlas_and_fid_kd() -> None:
    """Scores over the root of the width, and both temperatures .01, or 1."""
    mean = LOG_P.sum(2) / (TARGETS > 0).sum(1, keepdim=True)
    attention = WORTH.attention_PT
    assert attention is not None
    for name, worth, temperature in (
        ("pdist", mean, 0.01), ("loop", -3 * mean, 0.01), ("adist", attention.view(B, K), 1.0),
    ):  # fmt: skip
        objective = replace(
            OFF, **{name: 1.0, f"{name}_score_scale": "sqrt_width", f"{name}_score_temperature": temperature,
                    f"{name}_target_temperature": temperature},
        )  # fmt: skip
        score, target = (PRODUCT / 4 / temperature).log_softmax(1), (worth / temperature).log_softmax(1)
        right = SAMPLE * torch.nn.functional.kl_div(score, target, reduction="none", log_target=True).sum(1)
        torch.testing.assert_close(run(objective)[0][:, 0], right)


@pytest.mark.parametrize("name", [name for name in READER_OBJECTIVES if name != "generation"])
def test_every_objective_has_its_own_scale_weight_and_temperatures(name: str) -> None:
    plain = replace(OFF, **{name: 1.0})
    assert plain.reader_names == plain.score_names == (name,)
    loss = run(plain)[0]
    torch.testing.assert_close(run(replace(plain, **{name: 3.0}))[0], 3 * loss)
    temperature = plain.score_temperature(name)
    scaled = replace(plain, **{f"{name}_score_scale": "sqrt_width", f"{name}_score_temperature": temperature / 4})
    torch.testing.assert_close(run(scaled)[0], loss)
    warmer = replace(plain, **{f"{name}_score_temperature": 2 * temperature})
    assert (run(warmer)[0] - loss).abs().max() > 1e-3
    if name in DISTILLED:
        assert (run(replace(plain, **{f"{name}_target_temperature": 3.0}))[0] - loss).abs().max() > 1e-3
    others = {
        f"{other}_{field}": 7.0
        for other in READER_OBJECTIVES
        for field in ("score_temperature", "target_temperature")
        if other != name and hasattr(OFF, f"{other}_{field}")
    }
    assert torch.equal(run(replace(plain, **others))[0], loss)
    assert torch.equal(run(plain, distill_weight_B=torch.zeros(B).double())[0], loss * name.startswith("rag_"))


def test_a_sum_of_objectives_is_each_by_itself() -> None:
    names = [name for name in READER_OBJECTIVES if name != "generation"]
    whole, seen = run(replace(OFF, **dict.fromkeys(names, 1.0)))
    parts = [run(replace(OFF, **{name: 1.0})) for name in names]
    assert torch.equal(whole, torch.cat([loss for loss, _ in parts], 1))
    for _, statistics in parts:
        assert all(torch.equal(seen[name], value) for name, value in statistics.items())


def test_statistics_show_what_collapses() -> None:
    objective = replace(OFF, pdist=1.0, emdr2=1.0)
    _, seen = run(objective)
    assert set(seen) == {"margin", "pdist/target", "pdist/score", "emdr2/target", "emdr2/score"}

    def entropy(logits: list[float]) -> float:
        total = sum(map(math.exp, logits))
        return -sum(math.exp(x) / total * math.log(math.exp(x) / total) for x in logits)

    right = dict.fromkeys(seen, 0.0)
    for b in range(B):
        best, second = sorted(PRODUCT[b].tolist(), reverse=True)[:2]
        count, weight = int((TARGETS[b] > 0).sum()), float(SAMPLE[b])
        total = LOG_P[b].sum(1).tolist()
        right["margin"] += weight * (best - second)
        right["pdist/target"] += weight * entropy([x / count / 0.5 for x in total])
        for name in ("pdist", "emdr2"):
            right[f"{name}/score"] += weight * entropy([x / 0.1 for x in PRODUCT[b].tolist()])
        right["emdr2/target"] += weight * entropy(
            [s / 0.1 + x for s, x in zip(PRODUCT[b].tolist(), total, strict=True)]
        )
    assert {name: float(value.sum()) for name, value in seen.items()} == pytest.approx(right)
