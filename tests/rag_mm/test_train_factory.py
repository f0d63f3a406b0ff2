"""Training on an index that is not exact (``index.train_factory``): it repeats, resumes, and is the same on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retriever import approximate
from retriever import index as index_files
from tests.distributed import run_on_ranks
from tests.rag_mm.refreshed_runs import settings, train, train_on_ranks
from tests.rag_mm.test_async_refresh import cut_back

KIND = {"train_factory": "IVF6,Flat", "recall": 0.6, "recall_queries": 40}
MODES: dict[str, dict[str, Any]] = {
    "every_n_steps": {"index": {**KIND, "refresh": "every_n_steps", "refresh_every_n_steps": 2}},
    "async": {
        "index": {**KIND, "refresh": "async", "refresh_every_n_steps": 3, "refresh_lag": 2},
        "steps": 8, "retriever_share": 0.25,
    },
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_it_resumes_bit_for_bit_and_searches_lists(mode: str, factbook_dir: Path, tmp_path: Path):
    how = MODES[mode]
    undisturbed = train(settings(factbook_dir, tmp_path / "run", **how))
    for version in index_files.list_versions(tmp_path / "run" / "index"):
        manifest = index_files.load(tmp_path / "run" / "index", version=version).manifest
        assert manifest.factory == "IVF6,Flat" and manifest.recall_queries == 20 and manifest.recall_at_10 >= 0.5
        assert 0 < manifest.effort <= 6
    cut_back(tmp_path / "run", tmp_path / "cut", 4)
    assert train(settings(factbook_dir, tmp_path / "cut", **how))["lines"] == undisturbed["lines"]


@pytest.mark.parametrize("sharded", [False, True])
def test_two_ranks_find_what_one_finds(sharded: bool, factbook_dir: Path, tmp_path: Path):
    """With parts on each rank, all lists are visited: a rank looks further in its own where it has too little."""
    how = MODES["every_n_steps"]
    if sharded:
        how = {"index": {**how["index"], "recall": 1.0, "recall_queries": 400, "sharded": True}}
    one = train(settings(factbook_dir, tmp_path / "one", **how))
    ranks = run_on_ranks(train_on_ranks, 2, factbook_dir, tmp_path / "two", {**how, "ranks": 2})
    for a, b in zip(one["lines"], ranks[0]["lines"], strict=True):
        assert (a["retrieved_digest"], a["index_version"]) == (b["retrieved_digest"], b["index_version"])
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)


def test_lists_that_are_all_visited_are_the_exact_index(
    factbook_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(approximate, "search_hard_enough", lambda *args, **options: (6, 1.0))
    how = MODES["every_n_steps"]["index"]
    exact = train(settings(factbook_dir, tmp_path / "exact", index={**how, "train_factory": "Flat"}))
    whole = train(settings(factbook_dir, tmp_path / "whole", index=how))
    digests = [[line["retrieved_digest"] for line in run["lines"]] for run in (exact, whole)]
    assert digests[0] == digests[1] and any(digests[0])
