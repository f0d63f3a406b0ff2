"""The three phases against the one-process twin, on one rank and on real gloo ranks, over a small factbook."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import Plan
from pipeline.verify import gradient_report
from rag_mm.tower_program import tower_program
from rag_mm.towers import PipedTowers
from tests.distributed import run_on_ranks
from tests.rag_mm.joint_setup import build, config, gradients_here, in_float64, make_pipeline, prepare

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def gradient_errors(
    directory: Path, run_dir: Path, stages: int, replicas: int, towers: str = "dealt"
) -> dict[str, Any]:
    """This rank's gradients against the twin in both precisions, and what was compared."""
    settings = config(
        directory, ranks=stages, replicas=replicas, num_microbatches=4 if stages > 2 else 2, parallel={"towers": towers}
    )
    joint, reader = build(settings, run_dir)
    pipeline = make_pipeline(settings, joint, reader)
    prepared = prepare(joint)
    failures, found = {}, {}
    for dtype in (torch.float32, torch.float64):
        if dtype == torch.float64:
            in_float64(joint, reader, prepared)
        loss, right = joint.reference(prepared, reader)
        found = gradients_here(joint, prepared, pipeline)
        report = gradient_report(right, found, tolerance=TOLERANCE[dtype])
        failures |= {} if report else {dtype: report.message}
    outcome = joint.gradients(prepared, pipeline)
    return {
        "failures": failures,
        "compared": sorted(found),
        "all": sorted(right),
        "loss": (loss, outcome.loss),
        "shared": prepared.read.numel() - prepared.read.unique().numel(),
        "ids": prepared.ids,
        "losses": outcome.losses,
    }


def test_one_rank_equals_the_twin(factbook_dir: Path, tmp_path: Path):
    found = gradient_errors(factbook_dir, tmp_path, 1, 1)
    assert found["failures"] == {} and found["compared"] == found["all"]
    assert found["loss"][0] == pytest.approx(found["loss"][1], rel=1e-12)
    assert found["shared"] > 0  # some document is read by two questions
    assert set(found["losses"]) == {"contrastive", "generation", "pdist", "emdr2"}


@pytest.mark.parametrize("stages, replicas", [(2, 1), (3, 1), (1, 2), (2, 2)])
def test_any_layout_equals_the_twin(factbook_dir: Path, tmp_path: Path, stages: int, replicas: int):
    ranks = run_on_ranks(gradient_errors, stages * replicas, factbook_dir, tmp_path, stages, replicas)
    for found in ranks:
        assert found["failures"] == {}
        assert found["loss"][0] == pytest.approx(found["loss"][1], rel=1e-12)
        assert found["ids"] == ranks[0]["ids"]
    assert sorted({name for found in ranks for name in found["compared"]}) == ranks[0]["all"]


@pytest.mark.parametrize("stages, replicas", [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_piped_towers_equal_the_twin(factbook_dir: Path, tmp_path: Path, stages: int, replicas: int):
    arguments = (factbook_dir, tmp_path, stages, replicas, "piped")
    count = stages * replicas
    ranks = [gradient_errors(*arguments)] if count == 1 else run_on_ranks(gradient_errors, count, *arguments)  # type: ignore[arg-type]
    for found in ranks:
        assert found["failures"] == {}
        assert found["loss"][0] == pytest.approx(found["loss"][1], rel=1e-12)
    assert sorted({name for found in ranks for name in found["compared"]}) == ranks[0]["all"]
    for stage in range(stages):  # a stage holds its own part of the towers, and the scale is everybody's
        here = {name for name in ranks[stage]["compared"] if name.startswith("retriever.")}
        assert "retriever.log_scale" in here and (stages == 1 or len(here) < 9)


def _towers(directory: Path, run_dir: Path, kind: str) -> dict[str, Any]:
    joint, _ = build(config(directory, ranks=4, num_microbatches=4, parallel={"towers": kind}), run_dir)
    joint.towers.release()
    joint.memory.refresh(joint.towers, step=0, probe_BE=None, k=3, named=set())
    return {
        "embedding": joint._embedded(joint._taken(0).features).embedding,
        "hash": joint.towers.weights_hash(),
        "here": sorted(joint.towers.tensors_here()),
        "alive": sorted(name for name, p in joint.encoder.named_parameters() if not p.is_meta),
    }


def test_piped_towers_embed_what_dealt_ones_do(factbook_dir: Path, tmp_path: Path):
    dealt = run_on_ranks(_towers, 4, factbook_dir, tmp_path / "dealt", "dealt")
    piped = run_on_ranks(_towers, 4, factbook_dir, tmp_path / "piped", "piped")
    for one, other in zip(dealt, piped, strict=True):
        torch.testing.assert_close(one["embedding"], other["embedding"])
        assert one["hash"] == other["hash"]
        assert other["alive"] == other["here"]  # the memory of what other ranks hold is free
    here = [set(rank["here"]) - {"log_scale"} for rank in piped]
    assert sorted({"log_scale"}.union(*here)) == dealt[0]["here"]
    assert sum(map(len, here)) == len(set().union(*here))  # no name on two ranks


def test_the_towers_blocks_are_the_encoders_layers(factbook_dir: Path, tmp_path: Path):
    """Names in checkpoints are the encoder's, whatever the blocks; more stages than blocks is an error."""
    joint, _ = build(config(factbook_dir), tmp_path)
    encoder, program = joint.encoder, tower_program(joint.encoder)
    features = joint._taken(0).features
    assert torch.equal(program.run(features)["embedding"], encoder(features))
    own = {id(p): n for n, p in encoder.named_parameters()}
    names = {own[id(p)]: name for name, p in program.named_parameters_global().items()}
    assert sorted(names) == sorted(n for n in own.values() if n != "log_scale")
    assert len(program.blocks) == 6 and all(block.module.state_dict() for block in program.blocks)
    plan = Plan.from_cuts(program, [], num_microbatches=2)
    assert sorted(PipedTowers(encoder, joint.mesh, plan, timeout_s=1).tensors_here()) == sorted(encoder.state_dict())


def test_a_wrong_document_gradient_is_caught(factbook_dir: Path, tmp_path: Path):
    settings = config(factbook_dir)
    joint, reader = build(settings, tmp_path)
    pipeline = make_pipeline(settings, joint, reader)
    prepared = prepare(joint)
    _, right = joint.reference(prepared, reader)
    counts = torch.bincount(prepared.read, minlength=prepared.document_embedding.shape[0])
    backward = joint.towers.backward

    def once_a_reader(features: dict[str, torch.Tensor], grad_NE: torch.Tensor) -> None:
        again = features is prepared.document
        backward(features, grad_NE * counts.clamp(min=1).unsqueeze(1) if again else grad_NE)

    joint.towers.backward = once_a_reader  # type: ignore[method-assign]
    joint.gradients(prepared, pipeline)
    actual = {f"retriever.{n}": p.grad for n, p in joint.encoder.named_parameters() if p.grad is not None}
    report = gradient_report(right, actual, tolerance=1e-4)
    assert report.worst.startswith("retriever.") and report.worst_error > 0.05


def test_a_bad_sample_of_weight_0_moves_nothing(factbook_dir: Path, tmp_path: Path):
    settings = config(factbook_dir)
    joint, reader = build(settings, tmp_path)
    pipeline = make_pipeline(settings, joint, reader)
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


def unlabelled(directory: Path, run_dir: Path, stages: int, replicas: int, towers: str) -> dict[str, Any]:
    """What a batch of the retriever alone gives in which no query names a right document, and so none joins."""
    settings = config(
        directory, ranks=stages, replicas=replicas, parallel={"towers": towers}, retriever_share=1.0,
        retriever_batch_size=8,
    )  # fmt: skip
    joint, _ = build(settings, run_dir)
    whole = joint.samples

    def without(step: int) -> tuple[list[Any], list[Any]]:
        return tuple([replace(item, gold=(), hard_negatives=()) for item in items] for items in whole(step))  # type: ignore[return-value]

    joint.samples = without  # type: ignore[method-assign]
    prepared = joint.prepare(1)
    outcome = joint.gradients(prepared, None)
    gradients = [p.grad for p in (*joint.towers.sharded.values(), *joint.towers.replicated.values())]
    moved = [g for g in gradients if g is not None and g.count_nonzero()]
    return {"documents": prepared.positive.shape[1], "losses": outcome.losses, "moved": len(moved)}


@pytest.mark.parametrize(
    "stages, replicas, towers", [(1, 1, "dealt"), (1, 1, "piped"), (2, 1, "dealt"), (2, 1, "piped"), (1, 2, "dealt")]
)
def test_a_batch_in_which_nothing_is_right_moves_nothing(
    factbook_dir: Path, tmp_path: Path, stages: int, replicas: int, towers: str
):
    arguments, count = (factbook_dir, tmp_path, stages, replicas, towers), stages * replicas
    ranks = [unlabelled(*arguments)] if count == 1 else run_on_ranks(unlabelled, count, *arguments)  # type: ignore[arg-type]
    assert ranks == [{"documents": 0, "losses": {"contrastive": 0.0}, "moved": 0}] * count
