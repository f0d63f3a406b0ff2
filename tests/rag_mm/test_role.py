"""Ranks prepare only the pictures they compute with, and stop if they read different batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data.dataset import Pair, Sample
from data.document_store import DocumentStore
from data.image_formats import Unread
from rag_mm import preparation
from rag_mm.config import Config
from rag_mm.mesh import Mesh
from rag_mm.objectives import ObjectivesConfig
from rag_mm.role import Role
from rag_mm.step import JointStep
from rag_mm.training_batches import BatchMismatchError
from rag_mm.vision_once import VisionOnce
from tests.distributed import run_on_ranks
from tests.rag_mm.joint_setup import build, config, gradients_here, make_pipeline, prepare


def decoded(image_N3SS: torch.Tensor) -> list[int]:
    return (~image_N3SS.isnan().flatten(1).any(1)).nonzero().flatten().tolist()


def on_rank(directory: Path, out: Path, replicas: int, towers: str) -> dict[str, Any]:
    """The same step with every picture and with those of the role; what was decoded."""
    mined = ObjectivesConfig(pdist=0.7, contrastive=0.5, contrastive_mined_negatives=2, contrastive_mined_depth=4)
    settings = config(directory, ranks=2, replicas=replicas, objectives=mined, parallel={"towers": towers})
    joint, reader = build(settings, out)
    pipeline = make_pipeline(settings, joint, reader)
    whole = prepare(joint)
    expected = gradients_here(joint, whole, pipeline)
    joint.take_role(Role.of(joint.mesh, joint.towers, pipeline, None))
    for view in (joint.questions, joint.pairs):
        view._kept.clear()  # what was read when there was no role
    joint.memory.store, read = DocumentStore(joint.memory.store.folder.url), list[bool]()
    step_pictures = preparation.step_pictures

    def watched(config: Config, images: Sequence[bytes | None], *given: Any, **how: Any) -> Any:
        read.extend(not isinstance(image, Unread) for image in images)
        return step_pictures(config, images, *given, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "step_pictures", watched)
        part = joint.prepare(1)
    samples, pairs = joint.samples(1)
    found = gradients_here(joint, part, pipeline)
    assert whole.ids == part.ids and found.keys() == expected.keys()
    assert torch.equal(whole.positive, part.positive)
    return {
        "same": all(torch.equal(found[name], expected[name]) for name in expected),
        "queries": (decoded(part.query["image"]), part.query["image"].shape[0]),
        "documents": (decoded(part.document["image"]), part.document["image"].shape[0]),
        "read": [not isinstance(item.image, Unread) for item in (*samples, *pairs)],
        "read_documents": read,
        "pictures": (part.query["has_image"].tolist(), part.document["has_image"].tolist()),
        "answers": "target" in part.reader,
        "wanted": part.read.tolist(),
    }


@pytest.mark.parametrize(("replicas", "towers"), [(1, "dealt"), (2, "dealt"), (2, "piped")])
def test_a_rank_decodes_its_part_and_the_gradients_stay_bit_for_bit(
    factbook_dir: Path, tmp_path: Path, replicas: int, towers: str
):
    ranks = run_on_ranks(on_rank, 2 * replicas, factbook_dir, tmp_path, replicas, towers)
    size = 2 * replicas
    for rank, found in enumerate(ranks):
        replica, stage = divmod(rank, 2)
        assert found["same"], rank
        rows, count = found["queries"]
        first, step = (rank, size) if towers == "dealt" else (replica, replicas)
        embedded = set(range(first, count, step))
        reader = set(range(8 * replica // replicas, 8 * (replica + 1) // replicas)) if stage == 0 else set()
        assert set(rows) == embedded | reader  # 8 questions, then pairs
        rows, count = found["documents"]
        pairs = found["wanted"][24 * replica // replicas : 24 * (replica + 1) // replicas]
        assert set(rows) == set(range(first, count, step)) | (set(pairs) if stage == 0 else set())
        assert found["answers"] == (stage == 1)
        here = [set(found[name][0]) for name in ("queries", "documents")]
        needed = [
            [row in rows or not picture for row, picture in enumerate(has)]
            for rows, has in zip(here, found["pictures"], strict=True)
        ]
        assert found["read"] == needed[0] and not all(needed[0])
        # Some documents were read before, as candidates for negatives or right ones elsewhere.
        assert all(read >= must for read, must in zip(found["read_documents"], needed[1], strict=True))
        assert not all(found["read_documents"]) or all(needed[1])
    assert ranks[0]["pictures"] == ranks[-1]["pictures"] and all(sum(has) > 1 for has in ranks[0]["pictures"])


def test_pictures_encoded_once_are_those_that_the_rank_encodes(factbook_dir: Path, tmp_path: Path):
    """Asked of the code that reads them: what it reads is there, NaN would be found."""
    joint, reader = build(config(factbook_dir), tmp_path)
    prepared = prepare(joint)
    num, pictures = len(prepared.samples), prepared.document["image"].shape[0]
    for rank in range(3):
        role = Role(towers=(pictures + 99, 1), questions=None, documents=None, once=(rank, 3), answers=False)
        queries = role.query_rows(num, prepared.query["image"].shape[0])
        documents = role.document_rows(pictures, num, prepared.read)
        part = replace(
            prepared,
            document={**prepared.document, "image": prepared.document["image"].clone()},
            reader={**prepared.reader, "question_image": prepared.reader["question_image"].clone()},
        )
        part.document["image"][~documents] = float("nan")
        part.reader["question_image"][~queries[:num]] = float("nan")
        image, _ = VisionOnce(reader, Mesh(num_stages=1, num_replicas=1)).images(part)
        assert decoded(image) == list(range(rank, image.shape[0], 3))


@pytest.mark.parametrize(("local", "on_one_machine"), [(None, True), ("1", True), ("0", False)])
def test_ranks_on_several_machines_have_only_texts_read_ahead(
    factbook_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: str | None, on_one_machine: bool
):
    joint, _ = build(config(factbook_dir), tmp_path)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    pipeline: Any = SimpleNamespace(inputs_here=frozenset({"question"}))
    joint.take_role(Role.of(joint.mesh, joint.towers, pipeline, None))
    announced: list[bool] = []
    for view in (joint.questions, joint.pairs):
        monkeypatch.setattr(view, "will_need", lambda places, *, pictures: announced.append(pictures))
    joint.samples(0)
    assert announced and set(announced) == {on_one_machine}


def mismatched(directory: Path, out: Path, what: str) -> str:
    """A step in which rank 1 reads something else."""
    settings = config(directory, ranks=2)
    joint, _ = build(settings, out)
    joint.memory.refresh(joint.towers, step=0, probe_BE=None, k=3, named=set())
    if joint.mesh.rank == 1:
        disturb(joint, what)
    try:
        joint.prepare(1)
    except BatchMismatchError as error:
        return str(error)
    return "not noticed"


def disturb(joint: JointStep, what: str) -> None:
    whole = joint.samples

    def other(step: int) -> tuple[list[Sample], list[Pair]]:
        samples, pairs = whole(step)
        if what == "order":
            samples[1], samples[2] = samples[2], samples[1]
        elif what == "weight":
            samples[3] = replace(samples[3], weight=0.0)
        elif what == "gold":
            samples[3] = replace(samples[3], gold=(*samples[3].gold, "fr"))
        elif what == "text":
            samples[3] = replace(samples[3], question=samples[3].question + "?")
        else:
            pairs[0] = replace(pairs[0], id="other")
        return samples, pairs

    joint.samples = other  # type: ignore[method-assign]


@pytest.mark.parametrize("what", ["order", "weight", "text", "gold", "pair"])
def test_ranks_that_read_different_batches_stop_and_are_named(factbook_dir: Path, tmp_path: Path, what: str):
    for said in run_on_ranks(mismatched, 2, factbook_dir, tmp_path, what):
        assert said.startswith("step 2: rank 1 read another batch than rank 0")
        assert "nothing was trained on it" in said and str(factbook_dir) in said
