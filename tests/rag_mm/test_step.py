"""The three phases against the one-process twin, on one rank and on real gloo ranks, over a small factbook."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from data.config import DataConfig
from data.dataset import Dataset
from pipeline import Pipeline, Plan
from pipeline.config import ParallelConfig
from pipeline.verify import compare_gradients
from rag_mm.config import Config, TrainConfig
from rag_mm.memory import Memory
from rag_mm.mesh import Mesh
from rag_mm.model import build_model
from rag_mm.objectives import ObjectivesConfig
from rag_mm.prepared import Prepared
from rag_mm.reader.config import ReaderConfig
from rag_mm.step import JointStep
from rag_mm.towers import DealtTowers, PipedTowers, Towers, tower_program
from retriever.config import RetrieverConfig
from tests.distributed import run_on_ranks


def config(
    directory: Path, *, stages: int = 1, replicas: int = 1, towers: Literal["dealt", "piped"] = "dealt", **train: Any
) -> Config:
    """Everything on: dropout, a tied embedding, shared documents, all objectives."""
    return Config(
        run_dir=str(directory.parent / "run"),
        data=DataConfig(dir=str(directory)),
        retriever=RetrieverConfig(k=3, learned_text=True),
        reader=ReaderConfig(width=16, heads=2, ffn_width=24, encoder_layers=1, decoder_layers=2, dropout=0.2),
        objectives=ObjectivesConfig(pdist=0.7, emdr2=0.3, contrastive=0.5),
        train=TrainConfig(
            **{"steps": 4, "retriever_share": 0.0, "distill_share": 0.0, "batch_size": 8, "pair_batch_size": 6, **train}
        ),
        parallel=ParallelConfig(
            pipeline_stages=stages, data_replicas=replicas, num_microbatches=4 if stages > 2 else 2, towers=towers
        ),
    )


def build(settings: Config, run_dir: Path) -> tuple[JointStep, Pipeline]:
    """A step and its pipeline, in float64 so that only order of summation is left as an error."""
    mesh = Mesh(num_stages=settings.parallel.pipeline_stages, num_replicas=settings.parallel.data_replicas)
    dataset = Dataset(settings.data.dir)
    model = build_model(settings, dataset)
    memory = Memory(dataset.store, run_dir, mesh, image_size=24, batch_size=64, keep=1)
    towers: Towers = DealtTowers(model.encoder, mesh)
    if settings.parallel.towers == "piped":
        cuts = list(range(1, mesh.num_stages))
        plan = Plan.from_cuts(tower_program(model.encoder), cuts, num_microbatches=settings.parallel.num_microbatches)
        towers = PipedTowers(model.encoder, mesh, plan, timeout_s=60)
    joint = JointStep(settings, dataset, towers=towers, collator=model.collator, memory=memory, mesh=mesh)
    blocks = len(model.reader.blocks)
    cuts = [blocks * i // mesh.num_stages for i in range(1, mesh.num_stages)]
    plan = Plan.from_cuts(model.reader, cuts, num_microbatches=settings.parallel.num_microbatches)
    return joint, Pipeline(model.reader.train(), plan, group=mesh.pipeline, timeout_s=60)


def in_float64(joint: JointStep, pipeline: Pipeline, prepared: Prepared) -> None:
    """Turn weights and the prepared batch to float64; embeddings are computed anew."""
    joint.encoder.double()
    pipeline.program.double()

    def double(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}

    prepared.query, prepared.document = double(prepared.query), double(prepared.document)
    prepared.reader = double(prepared.reader)
    prepared.contrastive_weight = prepared.contrastive_weight.double()
    with torch.no_grad():
        prepared.query_embedding = joint.encoder(prepared.query)
        prepared.document_embedding = joint.encoder(prepared.document)


def gradient_errors(
    directory: Path, run_dir: Path, stages: int, replicas: int, towers: Literal["dealt", "piped"] = "dealt"
) -> dict[str, Any]:
    """Failures of this rank's gradients against the twin, and what was compared."""
    settings = config(directory, stages=stages, replicas=replicas, towers=towers)
    joint, pipeline = build(settings, run_dir)
    joint.memory.refresh(joint.towers, step=0, probe_BE=None, k=3, named=set())
    prepared = joint.prepare(1)
    in_float64(joint, pipeline, prepared)
    loss, right = joint.reference(prepared, pipeline.program)
    outcome = joint.gradients(prepared, pipeline)
    named = {f"reader.{n}": p for n, p in pipeline.parameters_here.items()}
    named |= {f"retriever.{n}": p for n, p in (*joint.towers.sharded.items(), *joint.towers.replicated.items())}
    actual = {n: p.grad for n, p in named.items() if p.grad is not None}
    return {
        "failures": [(f.name, f.error) for f in compare_gradients(right, actual, tolerance=1e-10)],
        "compared": sorted(actual),
        "all": sorted(right),
        "loss": (loss, outcome.loss),
        "shared": prepared.read.numel() - prepared.read.unique().numel(),
        "ids": prepared.ids,
        "losses": outcome.losses,
    }


def test_one_rank_equals_the_twin(factbook_dir: Path, tmp_path: Path):
    found = gradient_errors(factbook_dir, tmp_path, 1, 1)
    assert found["failures"] == [] and found["compared"] == found["all"]
    assert found["loss"][0] == pytest.approx(found["loss"][1], rel=1e-12)
    assert found["shared"] > 0  # some document is read by two questions
    assert set(found["losses"]) == {"contrastive", "generation", "pdist", "emdr2"}


@pytest.mark.parametrize("stages, replicas", [(2, 1), (3, 1), (1, 2), (2, 2)])
def test_any_layout_equals_the_twin(factbook_dir: Path, tmp_path: Path, stages: int, replicas: int):
    ranks = run_on_ranks(gradient_errors, stages * replicas, factbook_dir, tmp_path, stages, replicas)
    for found in ranks:
        assert found["failures"] == []
        assert found["loss"][0] == pytest.approx(found["loss"][1], rel=1e-12)
        assert found["ids"] == ranks[0]["ids"]
    assert sorted({name for found in ranks for name in found["compared"]}) == ranks[0]["all"]


@pytest.mark.parametrize("stages, replicas", [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_piped_towers_equal_the_twin(factbook_dir: Path, tmp_path: Path, stages: int, replicas: int):
    arguments = (factbook_dir, tmp_path, stages, replicas, "piped")
    count = stages * replicas
    ranks = [gradient_errors(*arguments)] if count == 1 else run_on_ranks(gradient_errors, count, *arguments)  # type: ignore[arg-type]
    for found in ranks:
        assert found["failures"] == []
        assert found["loss"][0] == pytest.approx(found["loss"][1], rel=1e-12)
    assert sorted({name for found in ranks for name in found["compared"]}) == ranks[0]["all"]
    for stage in range(stages):  # a stage holds its own part of the towers, and the scale is everybody's
        here = {name for name in ranks[stage]["compared"] if name.startswith("retriever.")}
        assert "retriever.log_scale" in here and (stages == 1 or len(here) < 9)


def _towers(directory: Path, run_dir: Path, kind: Literal["dealt", "piped"]) -> tuple[torch.Tensor, str, list[str]]:
    joint, _ = build(config(directory, stages=2, towers=kind), run_dir)
    joint.towers.release()
    joint.memory.refresh(joint.towers, step=0, probe_BE=None, k=3, named=set())
    samples, pairs = joint.samples(0)
    embedding = joint._queries(samples, pairs, 0).embedding
    return embedding, joint.towers.weights_hash(), sorted(joint.towers.tensors_here())


def test_piped_towers_embed_what_dealt_ones_do(factbook_dir: Path, tmp_path: Path):
    dealt = run_on_ranks(_towers, 2, factbook_dir, tmp_path / "dealt", "dealt")
    piped = run_on_ranks(_towers, 2, factbook_dir, tmp_path / "piped", "piped")
    for one, other in zip(dealt, piped, strict=True):
        torch.testing.assert_close(one[0], other[0])
        assert one[1] == other[1]
    assert sorted({*piped[0][2], *piped[1][2]}) == dealt[0][2]
    assert len(piped[0][2]) < len(dealt[0][2])


def test_a_wrong_document_gradient_is_caught(factbook_dir: Path, tmp_path: Path):
    joint, pipeline = build(config(factbook_dir), tmp_path)
    joint.memory.refresh(joint.towers, step=0, probe_BE=None, k=3, named=set())
    prepared = joint.prepare(1)
    _, right = joint.reference(prepared, pipeline.program)
    counts = torch.bincount(prepared.read, minlength=prepared.document_embedding.shape[0])
    backward = joint.towers.backward

    def once_a_reader(features: dict[str, torch.Tensor], grad_NE: torch.Tensor) -> None:
        again = features is prepared.document
        backward(features, grad_NE * counts.clamp(min=1).unsqueeze(1) if again else grad_NE)

    joint.towers.backward = once_a_reader  # type: ignore[method-assign]
    joint.gradients(prepared, pipeline)
    actual = {f"retriever.{n}": p.grad for n, p in joint.encoder.named_parameters() if p.grad is not None}
    worst = compare_gradients(right, actual, tolerance=1e-4)[0]
    assert worst.name.startswith("retriever.") and worst.error > 0.05


def test_a_bad_sample_of_weight_0_moves_nothing(factbook_dir: Path, tmp_path: Path):
    joint, pipeline = build(config(factbook_dir), tmp_path)
    joint.memory.refresh(joint.towers, step=0, probe_BE=None, k=3, named=set())

    def gradients(answer: str) -> list[torch.Tensor]:
        whole = joint.samples

        def spoiled(step: int):
            samples, pairs = whole(step)
            return [replace(samples[0], weight=0.0, answers=(answer,), gold=()), *samples[1:]], pairs

        joint.samples = spoiled  # type: ignore[method-assign]
        prepared = joint.prepare(1)
        joint.samples = whole  # type: ignore[method-assign]
        parameters = [*pipeline.parameters_here.values(), *joint.encoder.parameters()]
        for parameter in parameters:
            parameter.grad = None
        joint.gradients(prepared, pipeline)
        return [p.grad.clone() for p in parameters if p.grad is not None]

    for a, b in zip(gradients("x"), gradients("quite another answer"), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_a_step_is_a_pure_function_of_its_number(factbook_dir: Path, tmp_path: Path):
    joint, _ = build(config(factbook_dir), tmp_path)
    joint.memory.refresh(joint.towers, step=0, probe_BE=None, k=3, named=set())
    first, other, again = joint.prepare(3), joint.prepare(4), joint.prepare(3)
    assert joint.data_digest(first) == joint.data_digest(again) != joint.data_digest(other)
    assert first.ids == again.ids and torch.equal(first.query["image"], again.query["image"])
    assert all(torch.equal(first.reader[name], again.reader[name]) for name in first.reader)


def test_pairs_of_asked_documents_can_be_left_out(factbook_dir: Path, tmp_path: Path):
    everything, _ = build(config(factbook_dir, pairs="all"), tmp_path)
    unasked, _ = build(config(factbook_dir, pairs="unasked"), tmp_path)
    assert len(unasked.usable_pairs) < len(everything.usable_pairs)
    assert not any(unasked.asked & set(unasked.pairs[i].gold) for i in unasked.usable_pairs)
