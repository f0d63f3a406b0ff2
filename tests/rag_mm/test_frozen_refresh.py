"""Where what embeds documents is frozen, the index is made once: a refresh would give the same vectors."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rag_mm.config import Config
from rag_mm.memory import Memory
from retriever import index as index_files
from tests.distributed import run_on_ranks
from tests.rag_mm.refreshed_runs import settings, train

STEPS = {"refresh": "every_n_steps", "refresh_every_n_steps": 1}
ASYNC = {"refresh": "async", "refresh_every_n_steps": 2, "refresh_lag": 1}


def frozen(directory: Path, run_dir: Path, index: dict[str, Any], what: str = "document", **how: Any) -> Config:
    made = settings(directory, run_dir, index=index, retriever_towers="separate", **how)
    return dataclasses.replace(made, retriever=dataclasses.replace(made.retriever, freeze=what))


def versions(done: dict[str, Any]) -> list[int | None]:
    return [line["index_version"] for line in done["lines"]]


def searched(done: dict[str, Any]) -> list[Any]:
    return [(line["retrieved_digest"], line["loss"], line["grad_norm"]) for line in done["lines"]]


@pytest.mark.parametrize("index", [STEPS, ASYNC], ids=["every_n_steps", "async"])
def test_frozen_documents_are_embedded_once_and_nothing_else_changes(
    factbook_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: dict[str, Any]
):
    once = train(frozen(factbook_dir, tmp_path / "once", index))
    assert versions(once) == [None, None, 2, 2, 2, 2]
    assert index_files.list_versions(tmp_path / "once" / "index") == [2]
    assert not list((tmp_path / "once").glob("refresh/step-*"))
    shutil.rmtree(tmp_path / "once" / "checkpoints" / "step-6")
    resumed = train(frozen(factbook_dir, tmp_path / "once", index))
    assert resumed["lines"] == once["lines"]
    monkeypatch.setattr(Memory, "holds", lambda memory, towers: False)
    again = train(frozen(factbook_dir, tmp_path / "again", index))
    assert versions(again)[-1] == (5 if index is STEPS else 4)
    assert searched(again) == searched(once)
    assert all(torch.equal(tensor, once["weights"][name]) for name, tensor in again["weights"].items())


def test_other_towers_are_embedded_anew(factbook_dir: Path, tmp_path: Path):
    assert versions(train(frozen(factbook_dir, tmp_path, STEPS, what="query"))) == [None, None, 2, 3, 4, 5]


def on_ranks(directory: Path, run_dir: Path, how: dict[str, Any], sharded: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    return train(frozen(directory, run_dir, {**STEPS, "sharded": sharded}, **how))


@pytest.mark.parametrize(
    "how, sharded",
    [({"ranks": 2}, True), ({"ranks": 2, "parallel": {"towers": "piped"}}, False)],
    ids=["sharded", "piped"],
)
def test_ranks_agree_on_it(factbook_dir: Path, tmp_path: Path, how: dict[str, Any], sharded: bool):
    ranks = run_on_ranks(on_ranks, 2, factbook_dir, tmp_path, how, sharded, timeout_s=280)
    assert [versions(rank) for rank in ranks] == [[None, None, 2, 2, 2, 2]] * 2
