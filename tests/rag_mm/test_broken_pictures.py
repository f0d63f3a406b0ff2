"""Pictures of samples that cannot be decoded: known on all ranks though each decodes only its own, bit for bit."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data.dataset import Dataset
from data.sample_ids import from_key
from data.samples import emptied
from rag_mm.prepared import Prepared
from rag_mm.role import Role
from rag_mm.step import JointStep
from retriever import embed
from tests.distributed import run_on_ranks
from tests.rag_mm.damaged_data import broken_picture, changed_copy, no_json
from tests.rag_mm.joint_setup import build, config, gradients_here, make_pipeline

STEPS = 2


@pytest.fixture(scope="module")
def damaged(factbook_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Every third picture of a question and every fourth of a pair is broken; and the twin."""
    root = tmp_path_factory.mktemp("damaged")
    data = Dataset(factbook_dir)
    questions = {s.id for s in list(data.questions("train"))[::3] if s.image is not None}
    pairs = {p.id for p in list(data.pairs("train"))[::4] if p.image is not None}
    found = []
    for name, change in (("data", broken_picture), ("twin", no_json)):
        changed_copy(factbook_dir, root / name, "questions", questions, change)
        found.append(changed_copy(factbook_dir, root / name, "pairs", pairs, change))
    return found[0], found[1]


def make(directory: Path, out: Path, *, ranks: int, replicas: int, workers: int = 0) -> tuple[JointStep, Any]:
    settings = config(directory, ranks=ranks, replicas=replicas, retriever_share=0.25)
    joint, reader = build(replace(settings, data=replace(settings.data, workers=workers)), out)
    del joint.samples  # without the bad ones of the set-up
    return joint, make_pipeline(settings, joint, reader) if ranks > 1 else reader


def agrees(part: Prepared, whole: Prepared) -> bool:
    """The same step, but for pictures that a rank does not decode (NaN)."""
    mine, theirs = ([replace(s, image=None) for s in one.samples] for one in (part, whole))
    assert mine == theirs and part.ids == whole.ids
    for mine, theirs in ((part.query, whole.query), (part.document, whole.document), (part.reader, whole.reader)):
        for name in mine:
            here = ~mine[name].isnan()
            assert torch.equal(mine[name][here], theirs[name][here]), name
    return torch.equal(part.contrastive_weight, whole.contrastive_weight)


def on_rank(data: Path, twin: Path, out: Path, replicas: int) -> dict[str, Any]:
    joint, pipeline = make(data, out / "a", ranks=2, replicas=replicas)
    other, other_pipeline = make(twin, out / "b", ranks=2, replicas=replicas)
    for mine, theirs in ((joint.encoder, other.encoder), (pipeline.program, other_pipeline.program)):
        theirs.load_state_dict(mine.state_dict())  # the texts that they are fitted to differ
    for one in (joint, other):
        one.memory.refresh(one.towers, step=0, probe_BE=None, k=3, named=set())
    joint.take_role(Role.of(joint.mesh, joint.towers, pipeline, None))
    same, decoded, bad = [], [], set()
    decode = embed.decode
    for step in range(1, 1 + STEPS):
        embed.decode = lambda png, *given, **more: decoded.append(png) or decode(png, *given, **more)
        try:
            part = joint.prepare(step)
        finally:
            embed.decode = decode
        whole = other.prepare(step)
        expected = gradients_here(other, whole, other_pipeline)
        found = gradients_here(joint, part, pipeline)
        same.append(agrees(part, whole) and all(torch.equal(found[n], expected[n]) for n in expected))
        bad |= {sample.id for sample in part.samples if not sample.weight}
    return {"same": all(same), "bad": len(bad), "decoded": decoded, "counts": dict(joint.questions.bad.reasons),
            "pairs": dict(joint.pairs.bad.reasons), "shards": len(joint.pairs.bad.shards)}  # fmt: skip


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_agree_on_what_each_sees_a_part_of(damaged: tuple[Path, Path], tmp_path: Path, replicas: int):
    ranks = run_on_ranks(on_rank, 2 * replicas, *damaged, tmp_path, replicas)
    for found in ranks:
        assert found["same"] and found["bad"] > 0
        assert found["counts"] == ranks[0]["counts"] and found["counts"] == {"not an image": found["bad"]}
        assert found["pairs"] == ranks[0]["pairs"] and found["shards"] == 1
    broken = [sum(png.startswith(b"\xff\xd8") for png in found["decoded"]) for found in ranks]
    all_broken = sum(ranks[0]["counts"].values()) + sum(ranks[0]["pairs"].values())
    assert max(broken) < all_broken <= sum(broken)  # no rank looked at all of them


def failing(reads: Any, ranges: set[tuple[int, int, int]]) -> None:
    """A disk that gives everything but these bytes."""
    read = reads.read

    def partly(asked: Any) -> list[bytes]:
        if ranges & {tuple(one) for one in asked}:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        found: list[bytes] = read(asked)
        return found

    reads.read = partly


def on_rank_of_a_failing_disk(data: Path, twin: Path, out: Path, ids: set[str], ranks: int) -> dict[str, Any]:
    joint, _ = make(data, out / "a", ranks=ranks, replicas=1)
    other, _ = make(twin, out / "b", ranks=ranks, replicas=1)
    other.encoder.load_state_dict(joint.encoder.state_dict())
    view: Any = joint.questions
    samples = view._part.samples
    bad = [samples._place(i) for i, key in enumerate(samples.keys()) if from_key(key) in ids]
    pictures = [(shard, *samples.indices[shard].members(row)["png"]) for shard, row in bad]
    failing(samples.reads, {(shard, offset, offset + size) for shard, offset, size in pictures})
    rank = joint.mesh.rank
    joint.take_role(Role(towers=(rank, ranks), questions=None, documents=None, once=None, answers=rank > 0))
    same, emptied_ids = [], set()
    for step in range(1, 5):
        part, whole = joint._take(step), other._take(step)
        same.append([replace(s, image=None) for s in part.samples] == [replace(s, image=None) for s in whole.samples])
        here = ~part.features["image"].isnan()
        same.append(torch.equal(part.features["image"][here], whole.features["image"][here]))
        emptied_ids |= {s.id for s in part.samples if not s.weight}
    return {"same": all(same), "emptied": emptied_ids, "counts": dict(joint.questions.bad.reasons)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_picture_that_only_its_ranks_could_not_read_is_broken_for_all(factbook_dir: Path, tmp_path: Path, ranks: int):
    """And on one process, the same: its text was read, and then its slot has weight 0."""
    questions = [s for s in Dataset(factbook_dir).questions("train") if s.image is not None]
    ids = {s.id for s in questions[::3]}
    twin = changed_copy(factbook_dir, tmp_path / "twin", "questions", ids, no_json)
    given = (factbook_dir, twin, tmp_path, ids, ranks)
    found = run_on_ranks(on_rank_of_a_failing_disk, ranks, *given) if ranks > 1 else [on_rank_of_a_failing_disk(*given)]
    for one in found:
        assert one["same"] and one["emptied"] and one["emptied"] <= ids
        assert one["counts"] == {"unreadable shard: Input/output error": len(one["emptied"])}


@pytest.mark.parametrize("workers", [0, 1])
def test_one_process_takes_them_as_if_they_had_nothing(damaged: tuple[Path, Path], tmp_path: Path, workers: int):
    data, twin = damaged
    joint, _ = make(data, tmp_path / "a", ranks=1, replicas=1, workers=workers)
    other, _ = make(twin, tmp_path / "b", ranks=1, replicas=1)
    with joint.reading_ahead(start=0):
        for step in range(4):
            found, expected = joint._take(step), other._take(step)
            assert found.samples == expected.samples and found.pairs == expected.pairs
            assert all(torch.equal(found.features[name], expected.features[name]) for name in expected.features)
    assert joint.questions.bad.num_read == other.questions.bad.num_read
    assert joint.questions.bad.num_bad == other.questions.bad.num_bad > 0
    assert joint.pairs.bad.num_bad == other.pairs.bad.num_bad > 0


def test_nothing_is_decoded_before_the_first_batch(
    damaged: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("data.images.load_rgba", lambda png: pytest.fail("a picture was decoded"))
    joint, _ = make(damaged[0], tmp_path, ranks=1, replicas=1)
    assert joint.questions.bad.num_read == 0


def test_a_sample_that_is_emptied_is_what_reading_makes_of_it(damaged: tuple[Path, Path]):
    view = Dataset(damaged[0]).questions("train")
    unlooked = view.read_unlooked(range(len(view)))
    assert view.bad.num_bad == 0 and view.bad.num_read == len(view)
    looked = list(view)
    assert view.bad.num_bad == sum(not s.weight for s in looked) > 0 and view.bad.num_read == len(view)
    assert looked == [s if seen.weight else emptied(s) for s, seen in zip(unlooked, looked, strict=True)]
