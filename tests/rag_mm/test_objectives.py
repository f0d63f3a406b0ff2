"""Objectives against slow loops written from the formulas, and against finite differences in float64."""

import math

import pytest
import torch

from rag_mm import objectives


def rand(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_generation_is_the_weighted_sum_of_negative_log_likelihoods():
    log_p = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    weight = torch.tensor([[0.5, 0.25], [0.25, 0.0]])
    # 1 * .5 + 2 * .25 = 1 and 3 * .25 = .75
    assert objectives.generation(log_p, weight).tolist() == [1.0, 0.75]


def test_pdist_against_a_loop():
    score, likelihood, weight = (
        rand(3, 4, seed=0),
        rand(3, 4, seed=1),
        torch.tensor([0.5, 0.25, 0.25]).double(),
    )
    found = objectives.pdist(score, likelihood, weight, score_temperature=0.3, target_temperature=0.7)
    for b in range(3):
        target = [math.exp(x / 0.7) for x in likelihood[b].tolist()]
        guess = [math.exp(x / 0.3) for x in score[b].tolist()]
        target, guess = [t / sum(target) for t in target], [g / sum(guess) for g in guess]
        kl = sum(t * math.log(t / g) for t, g in zip(target, guess, strict=True))
        assert found[b].item() == pytest.approx(weight[b].item() * kl, rel=1e-12)


def test_emdr2_against_a_loop():
    score, likelihood, weight = (
        rand(3, 4, seed=0),
        rand(3, 4, seed=1) - 2,
        torch.tensor([0.5, 0.5, 0.0]).double(),
    )
    found = objectives.emdr2(score, likelihood, weight, score_temperature=0.5)
    for b in range(3):
        prior = [math.exp(x / 0.5) for x in score[b].tolist()]
        marginal = sum(p / sum(prior) * math.exp(x) for p, x in zip(prior, likelihood[b].tolist(), strict=True))
        assert found[b].item() == pytest.approx(-weight[b].item() * math.log(marginal), rel=1e-12)


@pytest.mark.parametrize("name", ["pdist", "emdr2"])
def test_distillation_moves_scores_only(name: str):
    score, likelihood = rand(2, 3, seed=0).requires_grad_(), rand(2, 3, seed=1).requires_grad_()
    weight = torch.ones(2, dtype=torch.float64)
    if name == "pdist":
        loss = objectives.pdist(score, likelihood, weight, score_temperature=0.2, target_temperature=0.5)
    else:
        loss = objectives.emdr2(score, likelihood, weight, score_temperature=0.2)
    loss.sum().backward()
    assert likelihood.grad is None and score.grad is not None and score.grad.abs().sum() > 0


def test_pdist_is_least_where_scores_agree_with_likelihoods():
    likelihood, weight = rand(1, 5, seed=3), torch.ones(1, dtype=torch.float64)
    agree = objectives.pdist(likelihood, likelihood, weight, score_temperature=0.4, target_temperature=0.4)
    assert agree.item() == pytest.approx(0.0, abs=1e-12)


def contrastive_loop(query, document, positive, weight, scale):
    total = []
    for q in range(query.shape[0]):
        right = [math.exp(scale * float(query[q] @ document[u])) for u in range(len(document)) if positive[q, u]]
        every = [math.exp(scale * float(query[q] @ document[u])) for u in range(len(document))]
        total.append(-float(weight[q]) * math.log(sum(right) / sum(every)) if right else 0.0)
    return total


def test_contrastive_against_a_loop_with_several_positives_and_none():
    query, document, scale = rand(4, 6, seed=0) / 3, rand(5, 6, seed=1) / 3, torch.tensor(3.0).double()
    positive = torch.zeros(4, 5, dtype=torch.bool)
    positive[0, 1] = positive[1, 0] = positive[1, 4] = positive[2, 3] = True
    weight = torch.tensor([0.4, 0.3, 0.3, 0.0]).double()
    found = objectives.contrastive(query, document, positive, weight, scale)
    assert found.tolist() == pytest.approx(contrastive_loop(query, document, positive, weight, 3.0), rel=1e-12)


def test_contrastive_gradient_in_float64():
    positive = torch.tensor([[True, False, True], [False, True, False]])
    weight = torch.tensor([0.5, 0.5]).double()

    def loss(query, document, scale):
        return objectives.contrastive(query, document, positive, weight, scale)

    inputs = (rand(2, 3, seed=0), rand(3, 3, seed=1), torch.tensor(2.0).double())
    assert torch.autograd.gradcheck(loss, [x.requires_grad_() for x in inputs])


def test_a_query_without_positive_has_no_gradient_and_no_nan():
    query = rand(1, 3, seed=0).requires_grad_()
    positive = torch.zeros(1, 2, dtype=torch.bool)
    loss = objectives.contrastive(
        query, rand(2, 3, seed=1), positive, torch.zeros(1).double(), torch.tensor(5.0).double()
    )
    loss.sum().backward()
    assert loss.item() == 0.0 and query.grad is not None and query.grad.abs().max() == 0.0
