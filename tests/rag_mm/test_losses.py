"""Losses against slow loops written from the formulas, and against finite differences in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given
from hypothesis import strategies as st

from rag_mm import losses


def rand(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_generation_is_the_weighted_sum_of_negative_log_likelihoods():
    log_p = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    weight = torch.tensor([[0.5, 0.25], [0.25, 0.0]])
    # 1 * .5 + 2 * .25 = 1 and 3 * .25 = .75
    assert losses.generation(log_p, weight).tolist() == [1.0, 0.75]


def test_pdist_against_a_loop():
    score, likelihood, weight = (
        rand(3, 4, seed=0),
        rand(3, 4, seed=1),
        torch.tensor([0.5, 0.25, 0.25]).double(),
    )
    found = losses.distillation(score, likelihood, weight, score_temperature=0.3, target_temperature=0.7)
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
    found = losses.emdr2(score, likelihood, weight, score_temperature=0.5)
    for b in range(3):
        prior = [math.exp(x / 0.5) for x in score[b].tolist()]
        marginal = sum(p / sum(prior) * math.exp(x) for p, x in zip(prior, likelihood[b].tolist(), strict=True))
        assert found[b].item() == pytest.approx(-weight[b].item() * math.log(marginal), rel=1e-12)


def test_rag_sequence_against_a_loop():
    score, weight = rand(3, 4, seed=0), torch.tensor([0.5, 0.5, 0.0]).double()
    log_p = rand(3, 4, 5, seed=1) - 2
    found = losses.rag_sequence(score, log_p.sum(2), weight, score_temperature=0.5)
    for b in range(3):
        prior = [math.exp(x / 0.5) for x in score[b].tolist()]
        marginal = 0.0
        for k in range(4):
            answer = prior[k] / sum(prior)
            for t in range(5):
                answer *= math.exp(log_p[b, k, t].item())
            marginal += answer
        assert found[b].item() == pytest.approx(-weight[b].item() * math.log(marginal), rel=1e-12)


def test_rag_token_against_a_loop():
    score, log_p = rand(3, 4, seed=0), rand(3, 4, 5, seed=1) - 2
    weight = rand(3, 5, seed=2).abs()
    weight[0, 3:] = 0.0
    found = losses.rag_token(score, log_p, weight, score_temperature=0.5)
    for b in range(3):
        prior = [math.exp(x / 0.5) for x in score[b].tolist()]
        total = 0.0
        for t in range(5):
            marginal = sum(prior[k] / sum(prior) * math.exp(log_p[b, k, t].item()) for k in range(4))
            total -= weight[b, t].item() * math.log(marginal)
        assert found[b].item() == pytest.approx(total, rel=1e-12)


def test_rag_objectives_of_one_token_are_the_same():
    score, log_p, weight = rand(3, 4, seed=0), rand(3, 4, 1, seed=1), rand(3, seed=2).abs()
    sequence = losses.rag_sequence(score, log_p[..., 0], weight, score_temperature=0.3)
    token = losses.rag_token(score, log_p, weight.unsqueeze(1), score_temperature=0.3)
    torch.testing.assert_close(sequence, token)


def test_rag_gradients_reach_scores_and_likelihoods_in_float64():
    weight_B, weight_BT = rand(2, seed=2).abs(), rand(2, 4, seed=3).abs()

    def sequence(score, log_p):
        return losses.rag_sequence(score, log_p.sum(2), weight_B, score_temperature=0.7)

    def token(score, log_p):
        return losses.rag_token(score, log_p, weight_BT, score_temperature=0.7)

    for loss in (sequence, token):
        inputs = [rand(2, 3, seed=0).requires_grad_(), rand(2, 3, 4, seed=1).requires_grad_()]
        assert torch.autograd.gradcheck(loss, inputs)
        loss(*inputs).sum().backward()
        assert all(x.grad.abs().max() > 1e-3 for x in inputs)


@pytest.mark.parametrize("name", ["RagSequenceForGeneration", "RagTokenForGeneration"])
def test_rag_losses_are_those_of_transformers(name: str):
    """Unreduced and without label smoothing. Its targets start with a token that it shifts away, and end in pads."""
    vocabulary, pad, samples, k, length = 11, 1, 3, 4, 6
    bart = transformers.BartConfig(
        vocab_size=vocabulary, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=1,
        decoder_attention_heads=1, encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=16,
        pad_token_id=pad, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    dpr = transformers.DPRConfig(
        vocab_size=vocabulary, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    config = transformers.RagConfig.from_question_encoder_generator_configs(dpr, bart, n_docs=k)
    model = getattr(transformers, name)(
        config=config,
        question_encoder=transformers.DPRQuestionEncoder(dpr),
        generator=transformers.BartForConditionalGeneration(bart),
    )
    g = torch.Generator().manual_seed(0)
    target = torch.randint(3, vocabulary, (samples, length + 1), generator=g)
    target[1, 4:] = pad
    target[2, 3:] = pad  # two positions are left after the shift: the fewest its RAG-Sequence can weigh
    score, logits = rand(samples, k, seed=1), rand(samples * k, length + 1, vocabulary, seed=2)
    theirs = model.get_nll(logits, score, target, reduce_loss=False, epsilon=0.0, n_docs=k)

    ours, is_target = target[:, 1:], target[:, 1:] != pad
    log_p = logits[:, :length].log_softmax(-1).unflatten(0, (samples, k))
    log_p = log_p.gather(3, ours[:, None, :, None].expand(-1, k, -1, 1)).squeeze(3)
    if name == "RagSequenceForGeneration":
        total = (log_p * is_target[:, None]).sum(2)
        found = losses.rag_sequence(score, total, torch.ones(samples), score_temperature=1.0)
    else:
        found = losses.rag_token(score, log_p, is_target.double(), score_temperature=1.0)
    torch.testing.assert_close(found, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["pdist", "emdr2"])
def test_distillation_moves_scores_only(name: str):
    score, likelihood = rand(2, 3, seed=0).requires_grad_(), rand(2, 3, seed=1).requires_grad_()
    weight = torch.ones(2, dtype=torch.float64)
    if name == "pdist":
        loss = losses.distillation(score, likelihood, weight, score_temperature=0.2, target_temperature=0.5)
    else:
        loss = losses.emdr2(score, likelihood, weight, score_temperature=0.2)
    loss.sum().backward()
    assert likelihood.grad is None and score.grad is not None and score.grad.abs().sum() > 0


def test_pdist_is_least_where_scores_agree_with_likelihoods():
    likelihood, weight = rand(1, 5, seed=3), torch.ones(1, dtype=torch.float64)
    agree = losses.distillation(likelihood, likelihood, weight, score_temperature=0.4, target_temperature=0.4)
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
    found = losses.contrastive(query, document, positive, weight, scale)
    assert found.tolist() == pytest.approx(contrastive_loop(query, document, positive, weight, 3.0), rel=1e-12)


def test_contrastive_gradient_in_float64():
    positive = torch.tensor([[True, False, True], [False, True, False]])
    weight = torch.tensor([0.5, 0.5]).double()

    def loss(query, document, scale):
        return losses.contrastive(query, document, positive, weight, scale)

    inputs = (rand(2, 3, seed=0), rand(3, 3, seed=1), torch.tensor(2.0).double())
    assert torch.autograd.gradcheck(loss, [x.requires_grad_() for x in inputs])


def test_a_query_without_positive_has_no_gradient_and_no_nan():
    query = rand(1, 3, seed=0).requires_grad_()
    positive = torch.zeros(1, 2, dtype=torch.bool)
    loss = losses.contrastive(query, rand(2, 3, seed=1), positive, torch.zeros(1).double(), torch.tensor(5.0).double())
    loss.sum().backward()
    assert loss.item() == 0.0 and query.grad is not None and query.grad.abs().max() == 0.0


@pytest.mark.parametrize("several", ["any", "each"])
def test_a_batch_without_any_document_gives_0_and_no_gradient(several):
    query, document = rand(2, 3, seed=0).requires_grad_(), torch.zeros(0, 3).double().requires_grad_()
    scale, positive = torch.tensor(5.0).double().requires_grad_(), torch.zeros(2, 0, dtype=torch.bool)
    loss = losses.contrastive(query, document, positive, torch.zeros(2).double(), scale, several=several)
    assert loss.tolist() == [0.0, 0.0]
    loss.sum().backward()
    assert all(x.grad is not None and x.grad.count_nonzero() == 0 for x in (query, document, scale))
    assert losses.contrastive_margin(query, document, positive).numel() == 0


def each_loop(query, document, positive, weight, scale):
    query, document, total = query.detach(), document.detach(), []
    for q in range(query.shape[0]):
        score = [math.exp(scale * float(query[q] @ document[u])) for u in range(len(document))]
        wrong = sum(s for u, s in enumerate(score) if not positive[q, u])
        right = [-math.log(s / (s + wrong)) for u, s in enumerate(score) if positive[q, u]]
        total.append(float(weight[q]) * sum(right) / len(right) if right else 0.0)
    return total


def test_contrastive_in_which_each_positive_counts_against_a_loop():
    query, document, scale = rand(5, 6, seed=0) / 3, rand(5, 6, seed=1) / 3, torch.tensor(3.0).double()
    positive = torch.zeros(5, 5, dtype=torch.bool)
    positive[0, 1] = positive[1, 0] = positive[1, 4] = positive[2, 3] = True
    positive[4] = True  # nothing is wrong: nothing to learn
    weight = torch.tensor([0.4, 0.3, 0.2, 0.0, 0.1]).double()
    inputs = [x.requires_grad_() for x in (query, document, scale)]
    found = losses.contrastive(*inputs[:2], positive, weight, inputs[2], several="each")
    assert found.tolist() == pytest.approx(each_loop(query, document, positive, weight, 3.0), rel=1e-12)
    assert found[4] == 0 and found[:3].min() > 0.01
    found.sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in inputs) and query.grad[3:].abs().max() == 0

    def loss(query, document, scale):
        return losses.contrastive(query, document, positive, weight, scale, several="each")

    assert torch.autograd.gradcheck(loss, [x.detach().requires_grad_() for x in (query, document, scale)])


@pytest.mark.parametrize("several", ["any", "each"])
def test_no_positive_is_a_negative_of_its_query(several):
    """Moving a second right document only ever lowers the loss."""
    query, document = rand(1, 4, seed=0), rand(4, 4, seed=1).requires_grad_()
    positive = torch.tensor([[True, True, False, False]])
    loss = losses.contrastive(
        query, document, positive, torch.ones(1).double(), torch.tensor(2.0).double(), several=several
    )
    loss.sum().backward()
    towards = document.grad @ query[0]  # change of the loss as the score rises
    assert towards[:2].max() < 0 < towards[2:].min()


def test_margin_of_the_contrastive_objective():
    query, document = torch.eye(2).double(), torch.tensor([[3.0, 1.0], [1.0, 0.5], [0.0, 4.0]]).double()
    positive = torch.tensor([[True, False, True], [False, True, False]])
    assert losses.contrastive_margin(query, document, positive).tolist() == [3.0 - 1.0, 0.5 - 4.0]
    assert losses.contrastive_margin(query, document, torch.ones_like(positive)).shape == (0,)


def token_mean_loop(value, is_target):
    rows = range(value.shape[0])
    return [
        [sum(v for v, t in zip(row, is_target[b].tolist(), strict=True) if t) / max(1, int(is_target[b].sum()))
         for row in value[b].tolist()] for b in rows
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["pdist", "adist", "loop"])
def test_what_a_document_is_worth_against_a_loop(name: str):
    value, is_target = rand(3, 2, 4, seed=0), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    found = getattr(losses, name)(value, is_target)
    sign = -1 if name == "loop" else 1
    expected = [[sign * x for x in row] for row in token_mean_loop(value, is_target)]
    assert found.tolist() == [pytest.approx(row, rel=1e-12) for row in expected]
    if name == "adist":  # one value, of the first token, is taken as it is
        assert torch.equal(losses.adist(value[..., :1], is_target), value[..., 0])


def test_emdr2_token_against_a_loop_and_without_gradient_of_likelihoods():
    score, log_p = rand(3, 4, seed=0).requires_grad_(), (rand(3, 4, 5, seed=1) - 2).requires_grad_()
    weight = rand(3, 5, seed=2).abs()
    found = losses.emdr2_token(score, log_p, weight, score_temperature=0.5)
    for b in range(3):
        prior = [math.exp(x / 0.5) for x in score[b].tolist()]
        total = 0.0
        for t in range(5):
            marginal = sum(prior[k] / sum(prior) * math.exp(log_p[b, k, t].item()) for k in range(4))
            total -= weight[b, t].item() * math.log(marginal)
        assert found[b].item() == pytest.approx(total, rel=1e-12)
    found.sum().backward()
    assert log_p.grad is None and score.grad.abs().max() > 1e-3

    def loss(score):
        return losses.emdr2_token(score, log_p, weight, score_temperature=0.5)

    assert torch.autograd.gradcheck(loss, [score.detach().requires_grad_()])


def test_distillation_and_generation_gradients_in_float64():
    worth, weight, weight_BT = rand(2, 3, seed=1), rand(2, seed=2).abs(), rand(2, 4, seed=3).abs()

    def distilled(score):
        return losses.distillation(score, worth, weight, score_temperature=0.3, target_temperature=0.4)

    def emdr2(score):
        return losses.emdr2(score, worth, weight, score_temperature=0.3)

    for loss in (distilled, emdr2):
        assert torch.autograd.gradcheck(loss, [rand(2, 3, seed=0).requires_grad_()])
    assert torch.autograd.gradcheck(lambda x: losses.generation(x, weight_BT), [rand(2, 4, seed=0).requires_grad_()])


SCORE_LOSSES = {
    "distillation": lambda s, p, w, wt: losses.distillation(
        s, losses.pdist(p, wt > 0), w, score_temperature=0.3, target_temperature=0.4
    ),
    "emdr2": lambda s, p, w, wt: losses.emdr2(s, (p * (wt > 0)[:, None]).sum(2), w, score_temperature=0.3),
    "emdr2_token": lambda s, p, w, wt: losses.emdr2_token(s, p, wt, score_temperature=0.3),
    "rag_sequence": lambda s, p, w, wt: losses.rag_sequence(s, (p * (wt > 0)[:, None]).sum(2), w, score_temperature=1),
    "rag_token": lambda s, p, w, wt: losses.rag_token(s, p, wt, score_temperature=1),
}


@given(seed=st.integers(0, 999), k=st.integers(2, 5), copies=st.integers(2, 4), padding=st.integers(0, 3),
       cut=st.integers(0, 4), name=st.sampled_from(sorted(SCORE_LOSSES)))  # fmt: skip
def test_scale_does_not_depend_on_k_padding_microbatches_or_replicas(seed, k, copies, padding, cut, name):
    """Every document several times, padded targets, samples of weight 0, and any cut of the batch: one loss."""
    loss, b, t = SCORE_LOSSES[name], 4, 3
    score, log_p = rand(b, k, seed=seed), rand(b, k, t, seed=seed + 1) - 2
    weight, weight_BT = rand(b, seed=seed + 2).abs(), rand(b, t, seed=seed + 3).abs() + 0.1
    right = loss(score, log_p, weight, weight_BT).sum()
    again = loss(score.repeat(1, copies), log_p.repeat(1, copies, 1), weight, weight_BT).sum()
    padded = loss(
        torch.cat([score, rand(1, k, seed=7)]), F.pad(torch.cat([log_p, log_p[:1]]), (0, padding), value=-9.0),
        F.pad(weight, (0, 1)), F.pad(weight_BT, (0, padding, 0, 1)),
    ).sum()  # fmt: skip
    parts = sum(
        loss(score[rows], log_p[rows], weight[rows], weight_BT[rows]).sum() for rows in (slice(cut), slice(cut, b))
    )
    for other in (again, padded, parts):
        torch.testing.assert_close(other, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("several", ["any", "each"])
def test_contrastive_does_not_depend_on_queries_of_weight_0(several):
    query, document, scale = rand(3, 4, seed=0), rand(5, 4, seed=1), torch.tensor(2.0).double()
    positive = torch.tensor([[1, 0, 0, 0, 1], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    weight = torch.tensor([0.5, 0.5, 0.0]).double()
    whole = losses.contrastive(query, document, positive, weight, scale, several=several).sum()
    part = losses.contrastive(query[:2], document, positive[:2], weight[:2], scale, several=several).sum()
    torch.testing.assert_close(whole, part)


def test_entropy_and_posterior():
    assert losses.entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]])).tolist() == pytest.approx([math.log(2), 0.0])
    score, log_p = rand(1, 2, seed=0), rand(1, 2, 3, seed=1)
    joint = [math.exp(score[0, k] / 0.5 + log_p[0, k, :2].sum()) for k in range(2)]  # the third is padding
    found = losses.posterior(score, log_p, torch.tensor([[True, True, False]]), score_temperature=0.5)
    assert found[0].tolist() == pytest.approx([x / sum(joint) for x in joint])
