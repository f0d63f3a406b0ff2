"""Documents that are damaged in the store: training takes them as empty ones, on all ranks alike, and counts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from data.dataset import Dataset
from data.document_entries import damaged_document
from rag_mm import checkpoint
from rag_mm.entry import main
from rag_mm.evaluate.__main__ import main as evaluate
from rag_mm.role import Role
from retriever.build import main as build_index
from tests.distributed import run_on_ranks
from tests.rag_mm.damaged_data import (
    broken_picture,
    changed_copy,
    empty_document,
    no_json,
    not_utf8,
    without_picture,
)
from tests.rag_mm.joint_setup import build, config, gradients_here, make_pipeline
from tests.rag_mm.test_bad_samples import flags
from tests.rag_mm.test_broken_pictures import agrees


def few(data: Path) -> dict[str, set[str]]:
    """A third of the documents, by what is done to them."""
    ids = list(Dataset(data).store.ids)
    return {"picture": set(ids[::9]), "json": set(ids[3::9]), "utf8": set(ids[6::9])}


@pytest.fixture(scope="module")
def damaged(factbook_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A third of the documents is damaged; and the twin, where they are empty or have no picture."""
    root, chosen = tmp_path_factory.mktemp("damaged"), few(factbook_dir)
    done = {"data": (broken_picture, no_json, not_utf8), "twin": (without_picture, empty_document, empty_document)}
    for name, changes in done.items():
        for ids, change in zip(chosen.values(), changes, strict=True):
            changed_copy(factbook_dir, root / name, "documents", ids, change)
    return root / "data", root / "twin"


def on_rank(data: Path, twin: Path, out: Path, replicas: int) -> dict[str, Any]:
    settings = config(data, ranks=2, replicas=replicas)
    made = [build(config(folder, ranks=2, replicas=replicas), out / folder.name) for folder in (data, twin)]
    (joint, reader), (other, other_reader) = made
    pipeline, other_pipeline = make_pipeline(settings, joint, reader), make_pipeline(settings, other, other_reader)
    for one in (joint, other):
        one.memory.refresh(one.towers, step=0, probe_BE=None, k=3, named=set())
    counted = dict(joint.memory.store.bad.found)  # what the ranks found in their shares, on all
    joint.take_role(Role.of(joint.mesh, joint.towers, pipeline, None))
    part, whole = joint.prepare(1), other.prepare(1)
    expected = gradients_here(other, whole, other_pipeline)
    found = gradients_here(joint, part, pipeline)
    same = agrees(part, whole) and all(torch.equal(found[name], expected[name]) for name in expected)

    store, joint_ids = joint.memory.store, part.ids
    only_here, strict = joint_ids[0][0], store.read
    if joint.mesh.rank == 1:  # a disk of this node fails
        store.read = lambda ids, **how: [  # type: ignore[method-assign]
            damaged_document(d.id, "unreadable shard: EIO") if d.id == only_here else d for d in strict(ids, **how)
        ]
    again = joint.prepare(1)
    return {
        "same": same, "counted": counted, "read": [n for names in joint_ids for n in names],
        "bad": dict(store.bad.found), "num_read": store.bad.num_read,
        "has": again.document["has_image"].tolist(), "only": only_here,
        "tokens": again.reader["document"].tolist(),
    }  # fmt: skip


def test_ranks_take_damaged_documents_as_empty_ones(damaged: tuple[Path, Path], tmp_path: Path):
    data, _ = damaged
    chosen = few(data)
    ranks = run_on_ranks(on_rank, 2, *damaged, tmp_path, 1)
    for found in ranks:
        assert found["same"]
        reasons = {"picture": "not an image", "json": "json: malformed", "utf8": "json: not UTF-8"}
        pictured = {d.id for d in Dataset(data).store.read(chosen["picture"]) if d.image is not None}
        assert found["counted"] == {n: reasons[kind] for kind, names in chosen.items() for n in names & (
            pictured if kind == "picture" else names)}  # fmt: skip
        assert found["num_read"] == len(Dataset(data).store)
        assert set(found["read"]) & set(found["counted"])  # some of them were read by the step
        assert found["has"] == ranks[0]["has"] and found["tokens"] == ranks[0]["tokens"]
        expected = {found["only"]: "unreadable shard: EIO"} | found["counted"]
        assert found["bad"] == expected  # on rank 0 as well, whose disk is good


def one_rank(data: Path, run_dir: Path, *others: str) -> list[str]:
    reading = ("--train.documents", "retrieved", "--retriever.k", "2", "--parallel.pipeline_stages", "1")
    short = ("--train.steps", "3", "--train.batch_size", "8")
    return flags(data, run_dir, *reading, *short, *others)


def test_few_are_said_and_many_stop_the_run(
    damaged: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    data, _ = damaged
    bad = sum(map(len, few(data).values()))
    assert main(one_rank(data, tmp_path / "many")) == 1
    said = capfd.readouterr().err
    assert "training stops after step 1, which is safe: documents of " in said
    assert f"are in {data / 'documents' / 'shard-000000.tar'}" in said and "data.max_bad_share 0.01" in said
    assert checkpoint.list_steps(tmp_path / "many") == [1]
    assert main(one_rank(data, tmp_path / "many", "--data.max_bad_share", "0.5")) == 0
    said = capfd.readouterr().err
    assert "documents are read without what is damaged of them: json: not UTF-8" in said
    lines = (tmp_path / "many" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3] and bad > 0
    assert evaluate(["--run-dir", str(tmp_path / "many"), "--rows", "joint,bm25", "--num", "8"]) == 0
    assert "documents are read without what is damaged of them: not an image" in capfd.readouterr().err


def test_building_an_index_counts_and_says_them(
    damaged: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    data, twin = damaged
    assert build_index(["--data.dir", str(data), "--index.dir", str(tmp_path / "a")]) == 1
    said = capfd.readouterr().err
    assert f"are in {data / 'documents' / 'shard-000000.tar'}" in said and not (tmp_path / "a" / "CURRENT").exists()
    assert (
        build_index(["--data.dir", str(data), "--index.dir", str(tmp_path / "a"), "--data.max_bad_share", "0.5"]) == 0
    )
    said = capfd.readouterr().err
    assert "documents are read without what is damaged of them: json: malformed" in said
    assert build_index(["--data.dir", str(twin), "--index.dir", str(tmp_path / "b")]) == 0
    vectors = [next((tmp_path / name / "versions").rglob("index.faiss")).read_bytes() for name in ("a", "b")]
    assert vectors[0] == vectors[1]


def test_an_id_that_does_not_exist_stays_an_error(damaged: tuple[Path, Path]):
    store = Dataset(damaged[0]).store
    with pytest.raises(KeyError, match="no document 'atlantis'"):
        store.read(["np", "atlantis"])
    with pytest.raises(ValueError, match="is malformed"):
        store.fetch(sorted(few(damaged[0])["json"]))
