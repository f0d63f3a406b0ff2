"""Small files of data sets, plans, checkpoints and runs, damaged in every way: a ``ValueError`` that names the file."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.dataset import Dataset
from data.json_files import read_json, read_regular
from pipeline.plan_file import Plan, StagePlan
from rag_mm import checkpoint
from rag_mm.bad_steps import BadStepsFile
from rag_mm.mesh import Mesh
from rag_mm.metrics import read_metrics
from rag_mm.saver import save
from retriever import checkpoint_files
from retriever.checkpoint_files import DamagedCheckpointError

PLAN = Plan((StagePlan(("a", "b")), StagePlan(("c",))), "1f1b", 2).to_json()
DAMAGE = {
    "empty": b"", "cut": b'{"a": [1, 2', "a list": b"[]", "a number": b"7", "null": b"null",
    "not UTF-8": b'{"a": "\xff"}', "deep": b"[" * 200_000, "digits": b"9" * 5000, "NUL": b"\0" * 100,
    "pickle": pickle.dumps({"a": 1}), "empty mapping": b"{}",
}  # fmt: skip


@pytest.fixture
def dataset(factbook_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(factbook_dir, tmp_path / "factbook")


def make_checkpoint(run: Path) -> Path:
    tensors = {"reader.a": torch.arange(6.0), "retriever.b": torch.ones(2, 3)}
    mesh = Mesh(num_stages=1, num_replicas=1)
    save(run, 4, tensors=tensors, state={"index_version": None}, mesh=mesh, keep=1)
    return checkpoint.checkpoint_dir(run, 4)


READERS: dict[str, Callable[[Path], Any]] = {
    "plan.json": Plan.read,
    "metrics.jsonl": lambda path: read_metrics(path.parent),
    "bad_steps.jsonl": lambda path: BadStepsFile(path.parent, start_step=9),
    "state.json": lambda path: checkpoint_files.read_state(path.parent),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_named(name: str, damage: str, tmp_path: Path):
    path = tmp_path / name
    lines = name.endswith(".jsonl")
    path.write_bytes(DAMAGE[damage] + b'\n{"step": 2}\n' * lines)  # not the last line, which a crash may cut off
    if lines and damage == "empty":
        READERS[name](path) if name == "metrics.jsonl" else None  # an empty line says nothing, and is none
        return
    with pytest.raises(ValueError, match=name):
        READERS[name](path)


@pytest.mark.parametrize("damage", [name for name in DAMAGE if name != "empty mapping"])
@pytest.mark.parametrize("name", ["dataset.json", "splits.json", "questions/entities.json"])
def test_a_damaged_data_set_is_named(name: str, damage: str, dataset: Path):
    (dataset / name).write_bytes(DAMAGE[damage])
    with pytest.raises(ValueError, match=Path(name).name):
        Dataset(dataset).questions("train")


@pytest.mark.parametrize(
    "name, contents",
    [
        ("dataset.json", {}),
        ("dataset.json", {"fields": "abc", "fingerprint": "x"}),
        ("dataset.json", {"fields": ["a"], "fingerprint": 7}),
        ("splits.json", {"folds": {}}),
        ("splits.json", {"folds": [{"dev": ["a"]}]}),
        ("splits.json", {"folds": [{"dev": ["a"], "test": [7]}]}),
    ],
)
def test_wrong_types_in_a_data_set_are_named(name: str, contents: dict[str, Any], dataset: Path):
    (dataset / name).write_text(json.dumps(contents))
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        Dataset(dataset)


@settings(max_examples=100)
@given(place=st.integers(0, len(PLAN) - 1), put=st.binary(max_size=6), cut=st.integers(0, 10))
def test_any_damage_to_a_plan_is_a_plan_or_named(place: int, put: bytes, cut: int, tmp_path_factory: Any):
    path = tmp_path_factory.getbasetemp() / "plan.json"
    path.write_bytes(PLAN.encode()[:place] + put + PLAN.encode()[place + cut :])
    try:
        assert isinstance(Plan.read(path), Plan)
    except ValueError as error:
        assert str(path) in str(error)


@settings(max_examples=40)
@given(data=st.data())
def test_no_flipped_bit_of_a_checkpoint_goes_unseen(data: st.DataObject, tmp_path_factory: Any):
    run = tmp_path_factory.getbasetemp() / "run"
    folder = checkpoint.checkpoint_dir(run, 4)
    if not folder.exists():
        make_checkpoint(run)
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    whole = path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    try:
        path.write_bytes(
            whole[:place] + bytes([whole[place] ^ (1 << data.draw(st.integers(0, 7)))]) + whole[place + 1 :]
        )
        try:
            checkpoint_files.verify(folder)
        except DamagedCheckpointError as error:
            assert str(folder) in str(error)
        else:  # only in what JSON does not say, such as another sort of space
            assert path.name == "state.json" and json.loads(path.read_bytes()) == json.loads(whole)
    finally:
        path.write_bytes(whole)


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


def test_pickles_in_a_checkpoint_are_never_read(tmp_path: Path):
    folder, marker = make_checkpoint(tmp_path), tmp_path / "marker"
    for name in (".metadata", "__0_0.distcp", "model.pt", "pytorch_model.bin"):
        (folder / name).write_bytes(pickle.dumps(Bomb(marker)))
    tensors = {"reader.a": torch.zeros(6)}
    checkpoint.load(tmp_path, 4, tensors)
    assert tensors["reader.a"].equal(torch.arange(6.0)) and not marker.exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert marker.is_dir()  # so it would have been seen


def test_a_forged_state_cannot_name_files_outside(tmp_path: Path):
    folder = make_checkpoint(tmp_path)
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    for name in ("../../secret.safetensors", str(tmp_path / "secret.safetensors")):
        document = json.loads((folder / "state.json").read_text())
        digest = hashlib.sha256(b"secret").hexdigest()
        document["files"][name] = {"size": 6, "sha256": digest}
        document["checksum"] = checkpoint_files._checksum(document)
        (folder / "state.json").write_text(json.dumps(document))
        with pytest.raises(DamagedCheckpointError, match="is missing"):
            checkpoint_files.verify(folder)


def test_folders_that_are_no_steps_are_not_counted(tmp_path: Path):
    make_checkpoint(tmp_path)
    for name in ("step-²", "step-007", "step-" + "9" * 40, "step--1"):
        shutil.copytree(checkpoint.checkpoint_dir(tmp_path, 4), tmp_path / "checkpoints" / name)
    assert checkpoint.list_steps(tmp_path) == [4]


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_never_ends_is_not_read(kind: str, tmp_path: Path):
    path = tmp_path / "dataset.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(ValueError, match=r"dataset\.json is not a regular file"):
        read_json(path)


def test_sizes_are_bounded_also_of_files_that_claim_none(tmp_path: Path):
    with (tmp_path / "sparse.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="at most 1073741824 are read"):
        read_json(tmp_path / "sparse.json")
    with pytest.raises(ValueError, match="at most 10 are read"):  # its size is given as 0
        read_regular("/proc/self/maps", largest=10)
    assert read_regular("/proc/self/maps", largest=1 << 24).count(b"\n") > 10
