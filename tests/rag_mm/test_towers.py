"""Towers of every kind on any layout: the gradients of one process, whatever is separate, frozen or fused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.lineage import require_sample_lineage
from pipeline.trace import trace
from pipeline.verify import gradient_report
from rag_mm.tower_program import tower_program
from retriever.config import RetrieverConfig
from retriever.encoder import DualEncoder
from tests.distributed import run_on_ranks
from tests.rag_mm.joint_setup import RETRIEVER, build, config, gradients_here, in_float64, make_pipeline, prepare
from tests.retriever.public_models import bert_folder, clip_config

KINDS = ("bert and efficientnet", "open_clip", "separate", "document frozen", "text frozen", "mean")


def retriever(kind: str, folder: Path) -> RetrieverConfig:
    """The small retriever of `joint_setup`, or one of public models, in a folder that has their files."""
    if kind == "bert and efficientnet":
        return RetrieverConfig(
            k=3, text="transformers", text_model=str(folder / "bert"), text_max_tokens=40, image="timm",
            image_model="tf_efficientnet_lite0", image_dim=16, image_side=32,
        )  # fmt: skip
    if kind == "open_clip":
        model = str(folder / "tiny-clip.json")
        return RetrieverConfig(
            k=3, text="open_clip", text_model=model, image="open_clip", image_model=model, fusion="learned"
        )
    changed: dict[str, Any] = {
        "separate": {"towers": "separate"},
        "document frozen": {"towers": "separate", "freeze": "document"},
        "text frozen": {"freeze": "text"},
        "mean": {"fusion": "mean", "shared_dim": 24},
    }[kind]
    return replace(RETRIEVER, **changed)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    bert_folder(folder / "bert")
    clip_config(folder)
    return folder


def errors(
    directory: Path, models: Path, run_dir: Path, kind: str, stages: int, replicas: int, towers: str
) -> dict[str, Any]:
    """This rank's gradients against the twin, in float64."""
    settings = config(
        directory, ranks=stages, replicas=replicas, num_microbatches=2 if stages < 3 else 4,
        parallel={"towers": towers}, retriever=retriever(kind, models),
    )  # fmt: skip
    joint, reader = build(settings, run_dir)
    pipeline = make_pipeline(settings, joint, reader)
    prepared = prepare(joint)
    in_float64(joint, reader, prepared)
    loss, right = joint.reference(prepared, reader)
    found = gradients_here(joint, prepared, pipeline)
    report = gradient_report(right, found, tolerance=1e-9)
    outcome = joint.gradients(prepared, pipeline)
    moved = sorted(name for name, grad in right.items() if grad.abs().max() > 0 and name.startswith("retriever."))
    return {
        "message": "" if report else report.message, "loss": (loss, outcome.loss), "compared": sorted(found),
        "all": sorted(right), "moved": moved,
    }  # fmt: skip


def check(ranks: list[dict[str, Any]], kind: str) -> None:
    for found in ranks:
        assert found["message"] == ""
        assert found["loss"][0] == pytest.approx(found["loss"][1], rel=1e-10)
    assert sorted({name for found in ranks for name in found["compared"]}) == ranks[0]["all"]
    moved = ranks[0]["moved"]
    assert any(".document." in name for name in moved) == (kind == "separate")
    assert any(name.startswith("retriever.text.") for name in moved) == (kind != "text frozen")
    assert any(name.startswith("retriever.image.") for name in moved)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_equals_the_twin(factbook_dir: Path, models: Path, tmp_path: Path, kind: str):
    check([errors(factbook_dir, models, tmp_path, kind, 1, 1, "dealt")], kind)


@pytest.mark.parametrize(
    "kind, stages, replicas, towers",
    [
        pytest.param("bert and efficientnet", 2, 1, "piped", marks=pytest.mark.slow),
        pytest.param("bert and efficientnet", 2, 1, "dealt", marks=pytest.mark.slow),
        ("open_clip", 2, 1, "piped"),
        pytest.param("open_clip", 1, 2, "dealt", marks=pytest.mark.slow),
        ("separate", 2, 1, "piped"),
        pytest.param("separate", 2, 2, "dealt", marks=pytest.mark.slow),
        ("document frozen", 2, 1, "dealt"),
        pytest.param("document frozen", 2, 2, "piped", marks=pytest.mark.slow),
        pytest.param("text frozen", 2, 1, "piped", marks=pytest.mark.slow),
        pytest.param("mean", 3, 1, "piped", marks=pytest.mark.slow),
    ],
)
def test_any_layout_equals_the_twin(
    factbook_dir: Path, models: Path, tmp_path: Path, kind: str, stages: int, replicas: int, towers: str
):
    arguments = (factbook_dir, models, tmp_path, kind, stages, replicas, towers)
    check(run_on_ranks(errors, stages * replicas, *arguments), kind)


def embedded(directory: Path, models: Path, run_dir: Path, kind: str, towers: str) -> dict[str, Any]:
    """Embeddings after what other ranks hold is released, in evaluation's and in training's batches."""
    settings = config(directory, ranks=2, parallel={"towers": towers}, retriever=retriever(kind, models))
    joint, _ = build(settings, run_dir)
    joint.towers.release()
    joint.memory.refresh(joint.towers, step=0, probe_BE=None, k=3, named=set())
    return {
        "embedding": joint._embedded(joint._taken(0).features).embedding, "hash": joint.towers.weights_hash(),
        "here": sorted(joint.towers.tensors_here()),
    }  # fmt: skip


@pytest.mark.slow
def test_piped_public_towers_keep_what_they_need_and_no_more(factbook_dir: Path, models: Path, tmp_path: Path):
    kind = "bert and efficientnet"
    dealt = run_on_ranks(embedded, 2, factbook_dir, models, tmp_path / "dealt", kind, "dealt")
    piped = run_on_ranks(embedded, 2, factbook_dir, models, tmp_path / "piped", kind, "piped")
    for one, other in zip(dealt, piped, strict=True):
        torch.testing.assert_close(one["embedding"], other["embedding"], rtol=0, atol=1e-5)
        assert one["hash"] == other["hash"]
    first, second = (set(rank["here"]) - {"log_scale"} for rank in piped)
    assert sorted(first | second | {"log_scale"}) == dealt[0]["here"] and not first & second


@pytest.mark.parametrize("kind", ["bert and efficientnet", "open_clip", "mean"])
def test_a_towers_blocks_are_its_layers_and_mix_no_rows(models: Path, kind: str):
    encoder = DualEncoder(retriever(kind, models), image_size=24).train()
    program = tower_program(encoder)
    assert len(program.blocks) > 5
    texts = ["what is nepal", "a flag", "", "peru and chad"]
    features = encoder.features(texts, torch.rand(4, 3, 24, 24), torch.tensor([1.0, 0.0, 1.0, 1.0]))
    given = {name: features[name] for name in program.inputs}
    assert torch.equal(program.run(given)["embedding"], encoder(features))
    mine = {id(p) for p in encoder.parameters()} - {id(encoder.log_scale)}
    assert mine == {id(p) for p in program.parameters()}
    require_sample_lineage(trace(program, given, num_microbatches=2, repeats=1, warmup=0, lineage_samples=4))
