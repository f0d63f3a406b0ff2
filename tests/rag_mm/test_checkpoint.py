"""Checkpoints: written beside the steps, sealed, read at any layout, and refused when damaged."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rag_mm import checkpoint
from rag_mm.config import CheckpointConfig
from rag_mm.mesh import Mesh
from rag_mm.saver import Saver, save
from retriever.checkpoint_files import DamagedCheckpointError
from tests.distributed import run_on_ranks


def alone() -> Mesh:
    return Mesh(num_stages=1, num_replicas=1)


def tensors(seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "reader.a.weight": torch.randn(5, 3, generator=draw),
        "reader.b.weight": torch.randn(2, 2, generator=draw, dtype=torch.float64),
        "optimizer.reader.a.weight.step": torch.tensor(7.0),
        "retriever.table": torch.randn(4, generator=draw).half(),
    }


def blank() -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}


def written(folder: Path, steps: tuple[int, ...] = (3, 6)) -> Path:
    for step in steps:
        save(folder, step, tensors=tensors(step), state={"index_version": step}, mesh=alone(), keep=5)
    return folder


def test_what_is_written_is_read(tmp_path: Path):
    written(tmp_path)
    for step in (3, 6):
        found = blank()
        checkpoint.load(tmp_path, step, found)
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors(step).items())
        assert checkpoint.read_state(tmp_path, step)["index_version"] == step
    assert checkpoint.newest_usable(tmp_path) == (6, [])


def test_nothing_in_it_is_a_pickle(tmp_path: Path):
    folder = checkpoint.checkpoint_dir(written(tmp_path), 6)
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}

    class Attack:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "code ran",))

    for name in (".metadata", "__0_0.distcp"):  # where torch's own storage keeps its pickles
        (folder / name).write_bytes(pickle.dumps(Attack()))
    checkpoint.load(tmp_path, 6, blank())
    assert not (tmp_path / "code ran").exists()


def shard(run: Path, step: int) -> Path:
    (path,) = checkpoint.checkpoint_dir(run, step).glob("*.safetensors")
    return path


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "truncated": lambda p: p.write_bytes(p.read_bytes()[:-1]),
    "flipped bit in the data": lambda p: flip(p, -3),
    "flipped bit in the header": lambda p: flip(p, 20),
    "missing": lambda p: p.unlink(),
    "foreign": lambda p: p.with_name("shard-00009-model-00001-of-00001.safetensors").write_bytes(p.read_bytes()),
    "state.json changed": lambda p: p.with_name("state.json").write_text(
        p.with_name("state.json").read_text().replace('"index_version": 6', '"index_version": 7')
    ),
    "state.json cut": lambda p: p.with_name("state.json").write_text(p.with_name("state.json").read_text()[:-9]),
    "state.json not UTF-8": lambda p: p.with_name("state.json").write_bytes(b"\xff\xfe{}"),
    "state.json of another kind": lambda p: p.with_name("state.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_named_and_the_one_before_is_used(tmp_path: Path, damage: str):
    DAMAGES[damage](shard(written(tmp_path), 6))
    with pytest.raises(DamagedCheckpointError, match="step-6"):
        checkpoint.load(tmp_path, 6, blank())
    step, said = checkpoint.newest_usable(tmp_path)
    assert step == 3
    assert "STEP 6 IS NOT USED" in said[0] and "going back to the checkpoint of step 3" in said[1]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path):
    flip(shard(written(tmp_path, (3,)), 3), -1)
    with pytest.raises(DamagedCheckpointError, match=r"no checkpoint of .* is usable.*restore one"):
        checkpoint.newest_usable(tmp_path)


def save_part(folder: str) -> None:
    """Each of two ranks holds one tensor alone and one in common."""
    mesh = Mesh(num_stages=2, num_replicas=1)
    mine = {f"reader.{mesh.rank}": torch.full((3,), float(mesh.rank)), "retriever.table": torch.arange(4.0)}
    saver = Saver(folder, mesh, CheckpointConfig(), timeout_s=60)
    saver.begin(5, mine, {"index_version": None})
    while saver.poll():
        pass
    saver.close()


def load_on_ranks(folder: str) -> str:
    mesh = Mesh(num_stages=2, num_replicas=1)
    found = {"retriever.table": torch.zeros(4), "reader.0": torch.zeros(3)}
    try:
        checkpoint.load(folder, 5, found, mesh=mesh)
    except DamagedCheckpointError as error:
        return str(error)
    return str(found["retriever.table"].tolist())


def test_ranks_write_together_and_any_layout_reads(tmp_path: Path):
    run_on_ranks(save_part, 2, str(tmp_path))
    found = {"reader.0": torch.ones(3), "reader.1": torch.ones(3), "retriever.table": torch.zeros(4)}
    checkpoint.load(tmp_path, 5, found)
    assert found["reader.0"].tolist() == [0.0] * 3 and found["reader.1"].tolist() == [1.0] * 3
    assert found["retriever.table"].tolist() == [0.0, 1.0, 2.0, 3.0]
    files = json.loads((checkpoint.checkpoint_dir(tmp_path, 5) / "state.json").read_text())["files"]
    assert len(files) == 2
    assert run_on_ranks(load_on_ranks, 2, str(tmp_path)) == ["[0.0, 1.0, 2.0, 3.0]"] * 2
    flip(sorted(checkpoint.checkpoint_dir(tmp_path, 5).glob("*.safetensors"))[1], -1)
    for message in run_on_ranks(load_on_ranks, 2, str(tmp_path)):  # found by one of them, said by both
        assert "has changed since it was written" in message


def load_through_a_fault(folder: str, times: int) -> str:
    """The second rank cannot open a file when torch reads the tensors, so many times."""
    import safetensors

    mesh, right, left = Mesh(num_stages=2, num_replicas=1), safetensors.safe_open, [None] * times
    found = {"retriever.table": torch.zeros(4), "reader.0": torch.zeros(3)}

    def odd(*arguments: Any, **options: Any) -> Any:
        if mesh.rank == 1 and left:
            left.pop()
            raise OSError(116, "Stale file handle")
        return right(*arguments, **options)

    safetensors.safe_open = odd
    try:
        checkpoint.load(folder, 5, found, mesh=mesh, wait_s=2.0 if times < 9 else 0.1)
    except OSError as error:
        return str(error)
    finally:
        safetensors.safe_open = right
    return str(found["retriever.table"].tolist())


def test_tensors_that_one_rank_cannot_read_once_are_read_again(tmp_path: Path):
    run_on_ranks(save_part, 2, str(tmp_path))
    assert run_on_ranks(load_through_a_fault, 2, str(tmp_path), 2) == ["[0.0, 1.0, 2.0, 3.0]"] * 2
    for said in run_on_ranks(load_through_a_fault, 2, str(tmp_path), 10**6):
        assert "could not be read" in said and "Stale file handle" in said and "step-5" in said
