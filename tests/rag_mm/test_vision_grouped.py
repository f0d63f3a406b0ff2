"""Pictures encoded once a micro-batch against pictures encoded for every pair, on one process and on ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeline import BlockProgram, Plan, trace
from pipeline.lineage import require_sample_lineage
from pipeline.verify import compare_gradients, whole_batch_gradients
from rag_mm.config import Config
from rag_mm.mesh import Mesh
from rag_mm.planning import choose_vision, plan_reader
from rag_mm.prepared import replica_share
from rag_mm.proof import prove
from rag_mm.step import JointStep
from rag_mm.vision_choice import make_vision, mode_of
from rag_mm.vision_grouped import BUCKETS, VisionGrouped, different_rows
from tests.distributed import run_on_ranks
from tests.rag_mm.joint_setup import READER, build, config, in_float64, make_pipeline, prepare
from tests.rag_mm.reader_batch import IMAGE, reader, reader_batch

K, SAMPLES = 3, 8


@given(
    st.integers(1, 4).flatmap(
        lambda m: st.integers(1, 12).flatmap(
            lambda pairs: st.tuples(st.just(m), st.lists(st.integers(0, 9), min_size=m * pairs, max_size=m * pairs))
        )
    )
)
def test_every_pair_finds_its_picture_in_its_micro_batch(case: tuple[int, list[int]]) -> None:
    count, numbers = case
    read_P = torch.tensor(numbers)
    picture_R, row_P = different_rows(read_P, num_microbatches=count)
    assert picture_R.shape[0] % count == 0
    pairs, rows = read_P.shape[0] // count, picture_R.shape[0] // count
    assert torch.equal(picture_R[row_P], read_P)  # the whole batch
    for m in range(count):
        own, mine = picture_R[m * rows : (m + 1) * rows], read_P[m * pairs : (m + 1) * pairs]
        assert torch.equal(own[row_P[m * pairs : (m + 1) * pairs] % rows], mine)
        assert set(own.tolist()) == set(mine.tolist())  # no picture of another micro-batch
    most = max(len(set(part.tolist())) for part in read_P.view(count, -1))
    assert most <= rows <= min(pairs, most + -(-pairs // BUCKETS) - 1)


def grouped_batch(*, num_microbatches: int) -> tuple[BlockProgram, dict[str, Any], VisionGrouped, dict[str, Any]]:
    """A reader without data set, its batch with every pair's picture, and both with those grouped."""
    whole, batch = reader("fid"), reader_batch(4, k=3)
    picture_C = torch.rand(5, 3, IMAGE, IMAGE, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    read_P = torch.tensor([0, 1, 0, 1, 1, 0, 2, 3, 4, 2, 0, 0])  # 2 and 4 different ones in halves
    vision = VisionGrouped(whole, num_microbatches=num_microbatches)
    batch["document_image"] = picture_C[read_P]
    return whole, batch, vision, vision.inputs(batch, picture_C, read_P)


def test_it_is_the_twin_and_padding_rows_contribute_nothing() -> None:
    whole, batch, vision, grouped = grouped_batch(num_microbatches=2)
    assert grouped["document_image"].shape[0] == 2 * 4  # the first half's 2 are filled up to the other's 4
    right = whole_batch_gradients(whole, batch, seed=0, step=0)
    assert any(g.any() for n, g in right.gradients.items() if n.startswith("vision"))
    other = dict(grouped)
    other["document_image"] = grouped["document_image"].clone()
    other["document_image"][[2, 3]] = 7.0  # what nobody reads
    for given_ in (grouped, other):
        found = whole_batch_gradients(vision.program, given_, seed=0, step=0)
        assert float(found.loss) == pytest.approx(float(right.loss), rel=1e-12)
        assert set(found.gradients) == set(right.gradients)
        assert not compare_gradients(right.gradients, found.gradients, tolerance=1e-12)


def test_the_trace_finds_a_group_and_lets_it_pass() -> None:
    _, _, vision, grouped = grouped_batch(num_microbatches=2)
    profile = trace(vision.program, grouped, num_microbatches=2, repeats=1, lineage_samples=4)
    assert [block.lineage for block in profile.blocks[:3]] == ["sample", "group", "sample"]
    assert profile.blocks[1].shared == ("grouped_patches",)
    require_sample_lineage(profile)


def share_documents(joint: JointStep) -> None:
    """Let all questions read some of six documents of those that were found."""
    search = joint.memory.search

    def few(query_BE: Tensor, *, k: int, forbidden: Any = None) -> tuple[list[list[str]], Tensor]:
        ids, scores = search(query_BE, k=k, forbidden=forbidden)
        pool = sorted({name for names in ids for name in names})[:6]
        return [[pool[(i * i + j) % len(pool)] for j in range(k)] for i in range(len(ids))], scores

    joint.memory.search = few  # type: ignore[method-assign]


def errors(
    directory: Path, run_dir: Path, mode: str, fusion: str, double: bool, stages: int, replicas: int, schedule: str
) -> dict[str, Any]:
    """Where this rank's gradients differ from one process running the whole batch with pictures repeated."""
    settings = config(
        directory, ranks=stages, replicas=replicas, schedule=schedule, reader=replace(READER, fusion=fusion)
    )
    joint, whole = build(settings, run_dir)
    vision = make_vision(mode, whole, joint.mesh, num_microbatches=2)
    share_documents(joint)
    prepared = prepare(joint)
    if double:
        in_float64(joint, whole, prepared)
    pipeline = make_pipeline(settings, joint, whole if vision is None else vision.program)
    encoded: list[int] = []
    whole.blocks[0].module.patch.register_forward_hook(lambda *args: encoded.append(args[1][0].shape[0]))
    outcome = joint.gradients(prepared, pipeline, vision)
    counted = sum(encoded)
    loss, right = joint.reference(prepared, whole)
    named = {f"reader.{n}": p for n, p in pipeline.parameters_here.items()}
    named |= {f"reader.{n}": p for n, p in (vision.parameters if vision else {}).items()}
    named |= {f"retriever.{n}": p for n, p in joint.towers.replicated.items()}
    actual = {n: p.grad for n, p in named.items() if p.grad is not None}
    shares = [replica_share({"read": prepared.read}, SAMPLES, r, replicas)["read"] for r in range(replicas)]
    return {
        "failures": compare_gradients(right, actual, tolerance=1e-10 if double else 1e-5),
        "loss": (outcome.loss, loss),
        "compared": sorted(actual),
        "all": sorted(right),
        "encoded": counted,
        "rows": sum(different_rows(read, num_microbatches=2)[0].shape[0] for read in shares),
        "pairs": prepared.read.numel(),
        "shared": prepared.read.numel() - prepared.read.unique().numel(),
    }


def check(ranks: list[dict[str, Any]], tolerance: float) -> None:
    for found in ranks:
        assert not found["failures"], found["failures"]
        assert found["loss"][0] == pytest.approx(found["loss"][1], rel=tolerance)
    assert sorted({name for found in ranks for name in found["compared"]}) == ranks[0]["all"]
    assert ranks[0]["shared"] > 0, "no document is read twice"


@pytest.mark.parametrize("double", [True, False], ids=["f64", "f32"])
@pytest.mark.parametrize("fusion", ["fid", "prepend"])
@pytest.mark.parametrize("mode", ["repeated", "grouped", "once"])
def test_each_mode_on_one_process_equals_the_whole_batch(
    factbook_dir: Path, tmp_path: Path, mode: str, fusion: str, double: bool
) -> None:
    found = errors(factbook_dir, tmp_path, mode, fusion, double, 1, 1, "1f1b")
    check([found], 1e-10 if double else 1e-5)
    if mode == "grouped":
        assert found["encoded"] == SAMPLES + found["rows"] < SAMPLES + found["pairs"]


LAYOUTS = [("fid", 2, 1, "1f1b"), ("prepend", 2, 2, "gpipe"), ("fid", 2, 1, "interleaved")]


@pytest.mark.parametrize(("fusion", "stages", "replicas", "schedule"), LAYOUTS)
def test_grouped_on_ranks_equals_the_whole_batch(
    factbook_dir: Path, tmp_path: Path, fusion: str, stages: int, replicas: int, schedule: str
) -> None:
    ranks = run_on_ranks(
        errors, stages * replicas, factbook_dir, tmp_path, "grouped", fusion, True, stages, replicas, schedule
    )
    check(ranks, 1e-10)


@pytest.mark.parametrize("mode", ["full", "staged", "shrunk"])
def test_the_proof_holds(factbook_dir: Path, tmp_path: Path, mode: str) -> None:
    settings = config(factbook_dir, parallel={"verify": mode})
    joint, whole = build(settings, tmp_path)
    vision = VisionGrouped(whole, num_microbatches=2)
    pipeline = make_pipeline(settings, joint, vision.program)
    assert f"proof: {mode}, loss and" in prove(settings, joint, joint.example(), pipeline, vision)


def test_closed_book_encodes_one_blank_picture_a_micro_batch(factbook_dir: Path, tmp_path: Path) -> None:
    settings = config(factbook_dir, documents="none")
    joint, whole = build(settings, tmp_path)
    prepared = joint.example()
    image, read_P = VisionGrouped.pictures(prepared)
    assert image.shape[0] == 1 and different_rows(read_P, num_microbatches=2)[0].shape[0] == 2
    vision = VisionGrouped(whole, num_microbatches=2)
    joint.gradients(prepared, make_pipeline(settings, joint, vision.program), vision)
    _, right = joint.reference(prepared, whole)
    actual = {f"reader.{n}": p.grad for n, p in whole.named_parameters_global().items() if p.grad is not None}
    assert actual and not compare_gradients(right, actual, tolerance=1e-5)


@pytest.mark.parametrize("mode", ["repeated", "grouped"])
def test_auto_keeps_the_way_that_the_run_s_plan_is_for(factbook_dir: Path, tmp_path: Path, mode: str) -> None:
    def settings(vision: str) -> Config:
        return config(factbook_dir, reader=replace(READER, vision=vision))

    joint, whole = build(settings("auto"), tmp_path)
    vision = make_vision(mode, whole, joint.mesh, num_microbatches=2)
    saved = Plan.from_cuts(whole if vision is None else vision.program, [], num_microbatches=2)
    plan, resumed, said = plan_reader(settings("auto"), whole, joint, joint.mesh, saved=saved)
    assert plan == saved and type(resumed) is type(vision) and "kept the plan" in said
    other = "repeated" if mode != "repeated" else "grouped"
    plan, resumed, said = plan_reader(settings(other), whole, joint, joint.mesh, saved=saved)
    assert mode_of(plan) == other and "kept the plan" not in said  # asked for by name: planned anew


def test_auto_says_what_it_predicts_of_all_three(factbook_dir: Path, tmp_path: Path) -> None:
    settings = config(factbook_dir, reader=replace(READER, vision="auto"))
    joint, whole = build(settings, tmp_path)
    vision, profile, said = choose_vision(settings, whole, joint, Mesh(num_stages=1, num_replicas=1))
    chosen = said.rpartition("so ")[2]
    assert all(f"{mode} " in said for mode in ("repeated", "grouped", "once")) and "pairs read each document" in said
    expected = make_vision(chosen, whole, joint.mesh, num_microbatches=2)
    assert type(vision) is type(expected)
    program = whole if vision is None else vision.program
    assert profile is not None and [b.name for b in profile.blocks] == [b.name for b in program.blocks]
