"""Ranked document lists against judgements, through trec_eval (pytrec-eval-terrier).

trec_eval sorts a list itself: by score, read in single precision, then by document id in *descending* order. Two scores
that differ only beyond single precision are a tie, and the order in the file means nothing. nDCG uses the grades as
gains, discounted by log2(rank + 1); recall@k divides by all relevant documents, also where there are more than k; MRR@k
is 0 where the first relevant document stands below k. A document counts as relevant from grade 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy
import pytrec_eval

Run = Mapping[str, Mapping[str, float]]
Qrels = Mapping[str, Mapping[str, int]]


def ranking_scores(run: Run, qrels: Qrels, *, ks: Sequence[int]) -> dict[str, dict[str, float]]:
    """Per query of ``qrels``: ``hit@k``, ``recall@k``, ``ndcg@k``, ``mrr@k``, and ``mrr`` and ``map`` of whole lists.

    A query that ``run`` lacks, or answers with an empty list, scores 0 in everything.
    """
    cuts = ",".join(map(str, ks))
    measures = {f"success.{cuts}", f"recall.{cuts}", f"ndcg_cut.{cuts}", "recip_rank", "map"}
    evaluator = pytrec_eval.RelevanceEvaluator({q: dict(d) for q, d in qrels.items()}, measures)
    lists = {query: dict(run[query]) for query in qrels if run.get(query)}
    found = evaluator.evaluate(lists) if lists else {}
    scores = {}
    for query, judged in qrels.items():
        values = found.get(query, {})
        row = {"mrr": values.get("recip_rank", 0.0), "map": values.get("map", 0.0)}
        first = first_relevant(lists.get(query, {}), judged)
        for k in ks:
            row[f"hit@{k}"] = values.get(f"success_{k}", 0.0)
            row[f"recall@{k}"] = values.get(f"recall_{k}", 0.0)
            row[f"ndcg@{k}"] = values.get(f"ndcg_cut_{k}", 0.0)
            row[f"mrr@{k}"] = 1 / first if first is not None and first <= k else 0.0
        scores[query] = row
    return scores


def trec_order(scored: Mapping[str, float]) -> list[str]:
    """Documents in the order in which trec_eval puts them."""
    return sorted(scored, key=lambda document: (numpy.float32(scored[document]), document), reverse=True)


def first_relevant(scored: Mapping[str, float], judged: Mapping[str, int]) -> int | None:
    """Rank, from 1, of the first relevant document; None if the list holds none."""
    order = trec_order(scored)
    return next((rank for rank, document in enumerate(order, start=1) if judged.get(document, 0) > 0), None)
