"""Pictures encoded once a step against pictures encoded for every pair, on one process and on ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import Pipeline, Plan
from pipeline.verify import compare_gradients
from rag_mm.vision_once import VisionOnce
from tests.distributed import run_on_ranks
from tests.rag_mm.joint_setup import build, config, in_float64


def _errors(directory: Path, run_dir: Path, stages: int, replicas: int, fusion: str) -> dict[str, Any]:
    settings = config(directory, ranks=stages, replicas=replicas)
    settings = replace(settings, reader=replace(settings.reader, fusion=fusion))
    joint, whole = build(settings, run_dir)
    vision = VisionOnce(whole, joint.mesh)
    blocks = len(vision.program.blocks)
    cuts = [blocks * i // stages for i in range(1, stages)]
    plan = Plan.from_cuts(vision.program, cuts, num_microbatches=settings.parallel.num_microbatches)
    pipeline = Pipeline(vision.program, plan, group=joint.mesh.pipeline, timeout_s=60)
    joint.memory.refresh(joint.towers, step=0, probe_BE=None, k=3, named=set())
    prepared = joint.prepare(1)
    in_float64(joint, whole, prepared)
    encoded: list[int] = []
    vision.whole.blocks[0].module.patch.register_forward_hook(lambda *args: encoded.append(args[1][0].shape[0]))
    outcome = joint.gradients(prepared, pipeline, vision)
    counted = sum(encoded)
    loss, right = joint.reference(prepared, whole)
    named = {f"reader.{n}": p for n, p in (*pipeline.parameters_here.items(), *vision.parameters.items())}
    actual = {n: p.grad for n, p in named.items() if p.grad is not None}
    reader = {n for n in right if n.startswith("reader.")}
    return {
        "failures": [(f.name, f.error) for f in compare_gradients(right, actual, tolerance=1e-10)],
        "missing": sorted({n for n in reader if "vision" in n} - set(actual)),
        "compared": sorted(actual),
        "reader": sorted(reader),
        "loss": (loss, outcome.loss),
        "encoded": counted,
        "pictures": len(prepared.samples) + prepared.read.unique().numel(),
        "pairs": prepared.read.numel(),
    }


@pytest.mark.parametrize("fusion", ["fid", "prepend"])
def test_encoded_once_is_the_twin_and_encodes_less(factbook_dir: Path, tmp_path: Path, fusion: str):
    found = _errors(factbook_dir, tmp_path, 1, 1, fusion)
    assert found["failures"] == [] and found["compared"] == found["reader"]
    assert found["loss"][0] == pytest.approx(found["loss"][1], rel=1e-12)
    assert found["encoded"] == 2 * found["pictures"]  # without graph, and with
    assert found["pairs"] + 8 > found["pictures"], "some document is read twice"


@pytest.mark.parametrize("stages, replicas", [(2, 1), (2, 2)])
def test_any_layout_equals_the_twin(factbook_dir: Path, tmp_path: Path, stages: int, replicas: int):
    ranks = run_on_ranks(_errors, stages * replicas, factbook_dir, tmp_path, stages, replicas, "fid")
    for found in ranks:
        assert found["failures"] == [] and found["missing"] == []
        assert found["loss"][0] == pytest.approx(found["loss"][1], rel=1e-12)
    assert sorted({name for found in ranks for name in found["compared"]}) == ranks[0]["reader"]
    assert sum(found["encoded"] for found in ranks) == 2 * ranks[0]["pictures"]  # each row on one rank


def test_gradients_of_the_vision_block_add_up(factbook_dir: Path, tmp_path: Path):
    joint, whole = build(config(factbook_dir), tmp_path)
    vision = VisionOnce(whole, joint.mesh)
    image, grad = torch.rand(3, 3, 24, 24), torch.rand(3, 9, 16)
    vision.backward(image, grad)
    once = {n: p.grad.clone() for n, p in vision.parameters.items() if p.grad is not None}
    vision.backward(image, grad)
    for name, parameter in vision.parameters.items():
        torch.testing.assert_close(parameter.grad, 2 * once[name])
