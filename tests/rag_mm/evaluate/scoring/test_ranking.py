"""Parity with ranx where scores do not tie, and values by hand for ties, grades and lists that are too short."""

import math
import os
import random

import pytest

os.environ.setdefault("NUMBA_DISABLE_JIT", "1")  # compiling takes half a minute, the lists here are short
import ranx

from rag_mm.evaluate.scoring.ranking import ranking_scores, trec_order


def test_parity_with_ranx_where_scores_do_not_tie() -> None:
    generator = random.Random(0)
    qrels: dict[str, dict[str, int]] = {}
    run: dict[str, dict[str, float]] = {}
    for query in range(60):
        documents = [f"d{i}" for i in range(30)]
        judged = generator.sample(documents, generator.randint(1, 8))
        qrels[f"q{query}"] = {d: generator.choice([1, 1, 2, 3]) for d in judged}
        listed = generator.sample(documents, generator.randint(1, 25))
        run[f"q{query}"] = {d: 1.0 - i / 64 for i, d in enumerate(listed)}
    scores = ranking_scores(run, qrels, ks=(1, 5, 10, 100))
    names = {"hit_rate": "hit", "recall": "recall", "ndcg": "ndcg", "mrr": "mrr"}
    measures = [f"{theirs}@{k}" for theirs in names for k in (1, 5, 10, 100)]
    ranx_qrels, ranx_run = ranx.Qrels(qrels), ranx.Run(run)
    theirs = ranx.evaluate(ranx_qrels, ranx_run, [*measures, "mrr", "map"])
    for measure, value in theirs.items():
        stem, at, k = measure.partition("@")
        ours = sum(row[f"{names.get(stem, stem)}{at}{k}"] for row in scores.values()) / len(scores)
        assert ours == pytest.approx(value), measure


def test_values_by_hand() -> None:
    scores = ranking_scores({"q": {"a": 3.0, "b": 2.0, "c": 1.0}}, {"q": {"b": 2, "c": 1, "x": 3}}, ks=(1, 2, 10))["q"]
    assert (scores["hit@1"], scores["hit@2"]) == (0.0, 1.0)
    assert (scores["recall@1"], scores["recall@2"], scores["recall@10"]) == pytest.approx((0.0, 1 / 3, 2 / 3))
    assert (scores["mrr"], scores["mrr@1"], scores["mrr@2"]) == (0.5, 0.0, 0.5)
    gain = 2 / math.log2(3) + 1 / math.log2(4)  # grade 2 at rank 2, grade 1 at rank 3
    ideal = 3 / math.log2(2) + 2 / math.log2(3) + 1 / math.log2(4)
    assert scores["ndcg@10"] == pytest.approx(gain / ideal)
    assert scores["map"] == pytest.approx((1 / 2 + 2 / 3) / 3)


def test_ties_stand_in_descending_order_of_ids() -> None:
    qrels = {"q": {"a": 1}}
    assert ranking_scores({"q": {"a": 1.0, "b": 1.0}}, qrels, ks=(1,))["q"]["hit@1"] == 0.0
    assert ranking_scores({"q": {"a": 1.0, "B": 1.0}}, qrels, ks=(1,))["q"]["hit@1"] == 1.0  # capitals sort first


def test_scores_that_differ_beyond_single_precision_tie() -> None:
    run = {"q": {"a": 1.0 + 1e-9, "b": 1.0}}
    assert ranking_scores(run, {"q": {"a": 1}}, ks=(1, 5))["q"]["mrr"] == 0.5
    assert ranking_scores(run, {"q": {"a": 1}}, ks=(1, 5))["q"]["mrr@5"] == 0.5


def test_our_order_is_that_of_trec_eval() -> None:
    """mrr@k is computed from it, mrr by trec_eval; with k beyond the list they must agree whatever ties."""
    generator = random.Random(3)
    for _ in range(200):
        ids = [generator.choice("aAbBéÉ東🙂zZ01") + generator.choice("aZé9") for _ in range(8)]
        run = {"q": {d: generator.choice([0.0, -1.0, 1.0, 1 + 1e-9, 1e-30]) for d in ids}}
        qrels = {"q": {generator.choice(ids): 1, generator.choice(ids): 0}}
        scores = ranking_scores(run, qrels, ks=(1, 100))["q"]
        assert scores["mrr@100"] == pytest.approx(scores["mrr"])
        assert scores["mrr@1"] == scores["hit@1"]
        assert set(trec_order(run["q"])) == set(ids)


def test_queries_without_list_or_without_relevant_documents_score_zero() -> None:
    scores = ranking_scores({"b": {}, "c": {"x": 1.0}}, {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 0}}, ks=(1, 5))
    assert set(scores) == {"a", "b", "c"}
    assert all(value == 0.0 for row in scores.values() for value in row.values())
    assert set(scores["a"]) == {"mrr", "map", *(f"{m}@{k}" for m in ("hit", "recall", "ndcg", "mrr") for k in (1, 5))}


def test_negative_grades_are_not_relevant() -> None:
    assert ranking_scores({"q": {"x": 1.0}}, {"q": {"x": -1, "y": 1}}, ks=(1,))["q"]["mrr@1"] == 0.0
