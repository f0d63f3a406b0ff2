"""Parity with clip-benchmark's retrieval and torchmetrics, a slow twin for ties, and cases worked by hand."""

import numpy
import pytest
import torch
from clip_benchmark.metrics.zeroshot_retrieval import recall_at_k
from torchmetrics.functional.retrieval import retrieval_hit_rate, retrieval_reciprocal_rank

from rag_mm.evaluate.scoring.image_text import Ties, folds, rank_in_list, ranks_from_scores


def slow_rank(scores: list[float], matches: list[bool], *, ties: Ties) -> int:
    """Sort: by score; of equal scores those that do not match first (pessimistic), or in the order given."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], matches[i] if ties == "pessimistic" else i))
    return next(rank for rank, i in enumerate(order, start=1) if matches[i])


@pytest.mark.parametrize("ties", ["pessimistic", "by_order"])
@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_ranks_are_those_of_the_slow_twin(ties: Ties, levels: int) -> None:
    """Few levels of score: ties everywhere. Owners are drawn, so images have one to many texts."""
    generator = numpy.random.default_rng(levels)
    for _ in range(30):
        owner_T = numpy.concatenate([numpy.arange(6), generator.integers(6, size=9)])
        scores = generator.integers(levels, size=(6, 15)).astype(numpy.float32)
        ranks = ranks_from_scores(scores, numpy.arange(6), owner_T, ties=ties)
        expected = [slow_rank(list(row), list(owner_T == image), ties=ties) for image, row in enumerate(scores)]
        assert ranks.tolist() == expected
        back = ranks_from_scores(scores.T, owner_T, numpy.arange(6), ties=ties)
        assert back.tolist() == [
            slow_rank(list(column), [i == owner for i in range(6)], ties=ties)
            for owner, column in zip(owner_T, scores.T, strict=True)
        ]


@pytest.mark.parametrize("k", [1, 5, 10])
def test_parity_with_clip_benchmark_where_no_scores_tie(k: int) -> None:
    generator = numpy.random.default_rng(0)
    owner_T = numpy.repeat(numpy.arange(40), 5)
    scores_TI = generator.normal(size=(200, 40)) + 1.5 * (owner_T[:, None] == numpy.arange(40))
    positive = torch.from_numpy(owner_T[:, None] == numpy.arange(40))
    theirs_image = float((recall_at_k(torch.from_numpy(scores_TI), positive, k) > 0).float().mean())
    theirs_text = float((recall_at_k(torch.from_numpy(scores_TI.T.copy()), positive.T, k) > 0).float().mean())
    text_to_image = ranks_from_scores(scores_TI, owner_T, numpy.arange(40), ties="pessimistic")
    image_to_text = ranks_from_scores(scores_TI.T, numpy.arange(40), owner_T, ties="pessimistic")
    assert (text_to_image <= k).mean() == pytest.approx(theirs_image)
    assert (image_to_text <= k).mean() == pytest.approx(theirs_text)


def test_parity_with_torchmetrics() -> None:
    generator = numpy.random.default_rng(1)
    owner_T = numpy.repeat(numpy.arange(20), 3)
    scores = generator.random((20, 60))  # positive: torchmetrics takes other scores for not retrieved
    ranks = ranks_from_scores(scores, numpy.arange(20), owner_T, ties="pessimistic")
    for image, rank in enumerate(ranks):
        row, target = torch.from_numpy(scores[image]), torch.from_numpy(owner_T == image)
        assert 1 / rank == pytest.approx(float(retrieval_reciprocal_rank(row, target)), rel=1e-6)
        assert float(rank <= 5) == float(retrieval_hit_rate(row, target, top_k=5))


def test_a_model_that_scores_everything_alike_is_last() -> None:
    scores = numpy.zeros((2, 4))
    owner_T = numpy.array([0, 0, 1, 1])
    assert ranks_from_scores(scores, numpy.arange(2), owner_T, ties="pessimistic").tolist() == [3, 3]
    assert ranks_from_scores(scores, numpy.arange(2), owner_T, ties="by_order").tolist() == [1, 3]


def test_half_precision_scores_tie() -> None:
    """1.0001 and 1.0 are one number in half precision: the matching one stands behind."""
    scores = numpy.array([[1.0001, 1.0]])
    owner = numpy.array([0, 1])
    assert ranks_from_scores(scores, numpy.array([0]), owner, ties="pessimistic").tolist() == [1]
    halves = scores.astype(numpy.float16)
    assert ranks_from_scores(halves, numpy.array([0]), owner, ties="pessimistic").tolist() == [2]


def test_errors() -> None:
    with pytest.raises(ValueError, match="query 1 and candidate 0 is NaN"):
        ranks_from_scores(numpy.array([[0.0], [numpy.nan]]), numpy.zeros(2, int), numpy.zeros(1, int), ties="by_order")
    with pytest.raises(ValueError, match="query 1 matches no candidate"):
        ranks_from_scores(numpy.zeros((2, 1)), numpy.array([0, 1]), numpy.array([0]), ties="by_order")


def test_rank_in_list_and_folds() -> None:
    assert rank_in_list(["b", "a", "c"], {"a", "c"}) == 2
    assert rank_in_list([], {"a"}) is None
    assert folds(6, size=2).tolist() == [0, 0, 1, 1, 2, 2]
    with pytest.raises(ValueError, match="5 images do not fill folds of 2"):
        folds(5, size=2)
