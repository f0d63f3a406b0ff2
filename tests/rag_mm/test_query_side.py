"""``index.refresh: query_side``: documents stand still from the first index on, on every layout and across a resume."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rag_mm.document_side import DocumentSide
from rag_mm.evaluate.run import load_run
from retriever import index as index_files
from retriever.embed import embed_documents
from tests.distributed import run_on_ranks
from tests.rag_mm.joint_setup import build, gradients_here, make_pipeline, prepare
from tests.rag_mm.refreshed_runs import opened, settings, train, train_on_ranks

QUERY_SIDE = {"refresh": "query_side"}


def document_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights.items() if name.startswith("document.")}


def test_documents_are_embedded_once_and_keep_their_bits(factbook_dir: Path, tmp_path: Path):
    made = settings(factbook_dir, tmp_path / "run", index=QUERY_SIDE)
    trainer = opened(made)
    joined: dict[str, torch.Tensor] = {}
    for step in range(made.train.steps):
        trainer.train_step()
        assert trainer.model.encoder.documents_follow == (step < made.train.retriever_steps)
        if step == made.train.retriever_steps - 1:
            joined = {n: t.clone() for n, t in trainer.towers.tensors_here().items() if not n.startswith("document.")}
    weights = trainer.towers.tensors_here()
    frozen = document_weights(weights)
    assert frozen.keys() == {f"document.{name}" for name in joined if name != "log_scale"}
    for name, tensor in frozen.items():  # the shared side as it was when the reader joined
        assert torch.equal(tensor, joined[name.removeprefix("document.")]), name
    moved = {name for name, tensor in joined.items() if not torch.equal(tensor, weights[name])}
    assert {"text.vector", "image.patch.weight"} <= moved  # and the questions' side trains on
    index = index_files.load(tmp_path / "run" / "index")
    store = trainer.dataset.store
    with torch.no_grad():
        now_UE = embed_documents(trainer.model.encoder, store, store.ids, image_size=24, batch_size=16)
    vectors_UE = torch.from_numpy(index.vectors.reconstruct_n(0, len(store)))
    assert torch.equal(now_UE, vectors_UE) and index_files.list_versions(tmp_path / "run" / "index") == [2]


def test_what_trains_before_and_after_equals_the_twin(factbook_dir: Path, tmp_path: Path):
    """Before the reader joins gradients of documents reach the shared side; afterwards none do."""
    made = settings(factbook_dir, tmp_path / "run", index=QUERY_SIDE, retriever_share=0.0)
    joint, reader = build(made, tmp_path / "index")
    side, pipeline = DocumentSide(joint.towers), make_pipeline(made, joint, reader)
    side.catch_up()
    follows = prepare(joint)
    before = gradients_here(joint, follows, pipeline)
    side.stand_still()
    still = prepare(joint)
    assert torch.equal(follows.document_embedding, still.document_embedding) and follows.ids == still.ids
    after = gradients_here(joint, still, pipeline)
    assert before.keys() == after.keys() and not document_weights(after)
    _, right = joint.reference(still, reader)
    assert right.keys() == after.keys()
    for name, gradient in right.items():
        torch.testing.assert_close(after[name], gradient, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(before["retriever.text.vector"], after["retriever.text.vector"])


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"ranks": 2}, marks=pytest.mark.slow),
        pytest.param({"replicas": 2}, marks=pytest.mark.slow),
        {"ranks": 2, "parallel": {"towers": "piped"}},
    ],
)
def test_layouts_agree(factbook_dir: Path, tmp_path: Path, how: dict[str, Any]):
    one = train(settings(factbook_dir, tmp_path / "one", index=QUERY_SIDE))
    ranks = run_on_ranks(train_on_ranks, 2, factbook_dir, tmp_path / "two", {"index": QUERY_SIDE, **how})
    for a, b in zip(one["lines"], ranks[0]["lines"], strict=True):
        assert (a["data_digest"], a["retrieved_digest"]) == (b["data_digest"], b["retrieved_digest"])
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)
    for rank in ranks:
        for name, tensor in document_weights(rank["weights"]).items():
            torch.testing.assert_close(tensor, one["weights"][name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("towers", ["shared", "separate"])
def test_resumed_before_and_after_the_reader_joins(factbook_dir: Path, tmp_path: Path, towers: str):
    made = settings(factbook_dir, tmp_path / "run", index=QUERY_SIDE, retriever_towers=towers)
    whole = train(made)
    for step in (2, 4):
        again = settings(factbook_dir, tmp_path / f"from-{step}", index=QUERY_SIDE, retriever_towers=towers)
        shutil.copytree(made.run_dir, again.run_dir)
        for later in range(step + 2, 7, 2):
            shutil.rmtree(Path(again.run_dir) / "checkpoints" / f"step-{later}")
        resumed = train(again)
        assert resumed["lines"] == whole["lines"]
        for name, tensor in whole["weights"].items():
            assert torch.equal(tensor, resumed["weights"][name]), name


def test_every_checkpoint_answers_with_the_side_that_training_used(factbook_dir: Path, tmp_path: Path):
    made = settings(factbook_dir, tmp_path / "run", index=QUERY_SIDE)
    train(made)
    for step, equal in ((2, True), (6, False)):  # until the reader joins the sides are one
        encoder = load_run(made.run_dir, step).model.encoder
        assert encoder.document is not None and not encoder.documents_follow
        sides = zip(encoder.text.parameters(), encoder.document.text.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in sides) == equal
