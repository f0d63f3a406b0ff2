"""``retriever.rerank``: the k that are read are the current best of the L that the index proposes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rag_mm.step import JointStep
from retriever.embed import document_features
from tests.distributed import run_on_ranks
from tests.rag_mm.joint_setup import build, prepare
from tests.rag_mm.refreshed_runs import settings

L = 12


def move(joint: JointStep) -> None:
    """Change the retriever's weights, as steps without a refresh would."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in joint.encoder.parameters():
            parameter.add_(0.3 * parameter.std(correction=0) * torch.randn(parameter.shape, generator=generator))


def reranked(directory: Path, run_dir: Path, how: dict[str, Any], rerank: int = L) -> dict[str, Any]:
    """What is read with an index of weights that have moved since; and what one by one, slowly, would be right."""
    made = settings(directory, run_dir, index={"refresh": "none"}, rerank=rerank, retriever_share=0.0, **how)
    joint, _ = build(made, run_dir / "index")
    prepare(joint)  # makes the index
    move(joint)
    prepared = joint.prepare(1)
    num, encoder, store = len(prepared.samples), joint.encoder, joint.memory.store
    query_BE = prepared.query_embedding[:num]
    proposed, _ = joint.memory.search(query_BE, k=L)
    right = []
    with torch.no_grad():
        for query_E, names in zip(query_BE, proposed, strict=True):
            scored = []
            for name in names:
                (document_E,) = encoder(document_features(encoder, store.fetch([name]), image_size=24))
                scored.append((-round((query_E @ document_E).item(), 4), name))
            right.append([name for _, name in sorted(scored)[: made.retriever.k]])
    return {
        "ids": prepared.ids, "right": right, "proposed": proposed, "rerank_s": prepared.rerank_s,
        "embedding": prepared.document_embedding, "read": prepared.read, "document": prepared.document,
        "now": encoder(prepared.document).detach(), "k": made.retriever.k,
    }  # fmt: skip


def test_the_best_of_the_proposals_are_read(factbook_dir: Path, tmp_path: Path):
    found = reranked(factbook_dir, tmp_path, {})
    assert found["ids"] == found["right"] and found["rerank_s"] > 0
    assert found["ids"] != [names[: found["k"]] for names in found["proposed"]]  # the index alone would be wrong


def test_without_it_the_index_decides_and_the_scores_that_train_are_the_current_ones(
    factbook_dir: Path, tmp_path: Path
):
    found = reranked(factbook_dir, tmp_path, {}, rerank=0)
    assert found["ids"] == [names[: found["k"]] for names in found["proposed"]]
    torch.testing.assert_close(found["embedding"], found["now"])  # not the index's vectors


@pytest.mark.parametrize("how", [{"ranks": 2}, {"replicas": 2}, {"ranks": 2, "parallel": {"towers": "piped"}}])
def test_layouts_read_the_same(factbook_dir: Path, tmp_path: Path, how: dict[str, Any]):
    one = reranked(factbook_dir, tmp_path / "one", {})
    for rank in run_on_ranks(_ids, 2, factbook_dir, tmp_path / "two", how):
        assert rank == one["ids"]


def _ids(directory: Path, run_dir: Path, how: dict[str, Any]) -> list[list[str]]:
    """The ids alone, where a rank may hold a part of the towers only."""
    made = settings(directory, run_dir, index={"refresh": "none"}, rerank=L, retriever_share=0.0, **how)
    joint, _ = build(made, run_dir / "index")
    prepare(joint)
    move(joint)
    return joint.prepare(1).ids
