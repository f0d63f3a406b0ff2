"""Index folders that a disk damaged or somebody made to do harm: named and refused, before faiss reads a byte."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retriever import index as index_files
from retriever.index import FLAT_HEADER, Index, Manifest

ROOT = Path(__file__).parents[2]
FILES = ("versions/0/index.faiss", "versions/0/ids.json", "versions/0/manifest.json", "CURRENT")


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index") / "right"
    embedding = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    Index.from_embeddings(embedding, [f"d{i}" for i in range(20)], Manifest("e", "w", "s", 0, 4, 20)).publish(folder)
    return folder


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=20)
@given(data=st.data())
def test_no_flipped_bit_and_no_cut_goes_unseen(name: str, right: Path, data: st.DataObject):
    path = right / name
    whole = path.read_bytes()
    try:
        place = data.draw(st.integers(0, len(whole) - 1))
        if data.draw(st.booleans()):
            path.write_bytes(
                whole[:place] + bytes([whole[place] ^ (1 << data.draw(st.integers(0, 7)))]) + whole[place + 1 :]
            )
        else:
            path.write_bytes(whole[:place] + data.draw(st.binary(max_size=20)))
        changed = path.read_bytes().strip() != whole.strip()
        try:
            index_files.load(right)
        except (ValueError, FileNotFoundError) as error:  # a version that CURRENT names may not be there
            assert str(right) in str(error)
        else:
            # Of these two the checksum is of what they say, not of how it is written.
            assert not changed or (name == FILES[2] and json.loads(path.read_bytes()) == json.loads(whole))
    finally:
        path.write_bytes(whole)
    index_files.load(right)


@pytest.mark.parametrize(
    "current",
    [b"", b"-1", b"1" * 60, b"9" * 100_000, b"0x0", b"1_0", b"../../x", b"0\n1", b"\xff\xfe", "²".encode(), b"00"],
)  # fmt: skip
def test_rubbish_in_current_is_named(current: bytes, right: Path, tmp_path: Path):
    copy = shutil.copytree(right, tmp_path / "copy")
    (copy / "CURRENT").write_bytes(current)
    with pytest.raises(ValueError, match="CURRENT"):
        index_files.load(copy)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest as somebody would who knows how checksums are made."""
    path = folder / "versions" / "0" / "manifest.json"
    document = json.loads(path.read_text())
    del document["checksum"]
    for name, key in (("index.faiss", "sha256"), ("ids.json", "ids_sha256")):
        document[key] = hashlib.sha256((path.parent / name).read_bytes()).hexdigest()
    change(document)
    document["checksum"] = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(document))


WRONG_FIELDS = {
    "negative dim": {"dim": -4},
    "huge dim": {"dim": 1 << 62},
    "negative count": {"count": -1},
    "huge count": {"count": 1 << 60},
    "number as text": {"count": "20"},
    "yes as number": {"num_edits": True},
    "a list": {"encoder": []},
    "unknown": {"more": 1},
    "another factory": {"factory": "IVF4096,Flat"},
    "another metric": {"metric": "L2"},
    "another size": {"count": 21},
}


@pytest.mark.parametrize("case", WRONG_FIELDS)
def test_manifests_of_a_forger_are_refused(case: str, right: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    copy = shutil.copytree(right, tmp_path / "copy")
    rewrite(copy, lambda document: document.update(WRONG_FIELDS[case]))
    monkeypatch.setattr(index_files.faiss, "read_index", lambda name: pytest.fail("faiss reads it"))
    with pytest.raises(ValueError, match=str(copy)):
        index_files.load(copy)


@settings(max_examples=20)
@given(
    kind=st.sampled_from([b"IxFI", b"IwFl", b"IxHe", b"Ix2L", b"IxPT", b"\0\0\0\0"]),
    dim=st.integers(-(2**31), 2**31 - 1),
    count=st.integers(-(2**63), 2**63 - 1), floats=st.integers(0, 2**64 - 1),
)  # fmt: skip
def test_faiss_gets_no_header_that_claims_more(right: Path, kind: bytes, dim: int, count: int, floats: int):
    """It would allocate what is claimed, and read other index types by their own rules."""
    path = right / "versions" / "0" / "index.faiss"
    manifest = path.parent / "manifest.json"
    whole, said = path.read_bytes(), manifest.read_bytes()
    try:
        path.write_bytes(
            FLAT_HEADER.pack(kind, dim, count, 1 << 20, 1 << 20, True, 0, floats) + whole[FLAT_HEADER.size :]
        )
        rewrite(right, lambda document: None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(index_files.faiss, "read_index", lambda name: pytest.fail("faiss reads it"))
            with pytest.raises(ValueError, match="not a flat index"):
                index_files.load(right)
    finally:
        path.write_bytes(whole)
        manifest.write_bytes(said)


IDS = {
    "a mapping": "{}",
    "numbers": json.dumps(list(range(20))),
    "too few": '["a"]',
    "deep": "[" * 100_000,
    "no UTF-8": "\udcff",
}


@pytest.mark.parametrize("case", IDS)
def test_ids_of_a_forger_are_refused(case: str, right: Path, tmp_path: Path):
    copy = shutil.copytree(right, tmp_path / "copy")
    (copy / "versions" / "0" / "ids.json").write_bytes(IDS[case].encode(errors="surrogateescape"))
    rewrite(copy, lambda document: None)
    with pytest.raises(ValueError, match="ids"):
        index_files.load(copy)


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch MARKER",)


def test_pickles_are_not_read_and_pipes_and_devices_not_waited_for(right: Path, tmp_path: Path):
    """In a process with bounded memory and time, since a fault here would be a hang or a full machine."""
    for name in FILES:
        for kind in ("pickle", "pipe", "device", "link to itself"):
            copy = shutil.copytree(right, tmp_path / f"{kind}-{Path(name).name}")
            path = copy / name
            path.unlink()
            if kind == "pickle":
                path.write_bytes(pickle.dumps(Bomb()))
            elif kind == "pipe":
                os.mkfifo(path)
            else:
                path.symlink_to("/dev/zero" if kind == "device" else path.name)
    program = (
        "import resource, sys, pathlib; from retriever import index\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() + (300 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size, size))\n"
        "for folder in sorted(pathlib.Path('.').iterdir()):\n"
        "    try: index.load(folder.resolve())\n"
        "    except (ValueError, OSError) as error: assert str(folder) in str(error), error\n"
        "    else: print('read', folder)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (60, 60)),
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "", done.stderr
    assert not (tmp_path / "MARKER").exists()


def test_what_is_no_version_is_not_counted(right: Path, tmp_path: Path):
    copy = shutil.copytree(right, tmp_path / "copy")
    for name in ("²", "-1", "1e3", "9" * 40, ".7.123.tmp", "007"):
        (copy / "versions" / name).mkdir()
    assert index_files.list_versions(copy) == [0]
