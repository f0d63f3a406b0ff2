"""Index folders that a disk damaged or somebody made to do harm: named and refused, before faiss reads a byte."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import resource
import shutil
import struct
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
from retriever.faiss_import import faiss
from retriever.id_file import FOOTER, MARK
from retriever.index import FLAT_HEADER, Index, Manifest

ROOT = Path(__file__).parents[2]
FILES = ("versions/0/index.faiss", "versions/0/ids", "versions/0/manifest.json", "CURRENT")


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
    for name, key in (("index.faiss", "sha256"), ("ids", "ids_sha256")):
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
    "negative dead": {"num_dead": -1},
    "more added than there are": {"num_added": 21},
    "no number as recall": {"recall_at_10": float("nan")},
    "another metric": {"metric": "L2"},
    "another size": {"count": 21},
}


@pytest.mark.parametrize("case", WRONG_FIELDS)
def test_manifests_of_a_forger_are_refused(case: str, right: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    copy = shutil.copytree(right, tmp_path / "copy")
    rewrite(copy, lambda document: document.update(WRONG_FIELDS[case]))
    monkeypatch.setattr(index_files.faiss, "read_index", lambda *arguments: pytest.fail("faiss reads it"))
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
            patch.setattr(index_files.faiss, "read_index", lambda *arguments: pytest.fail("faiss reads it"))
            with pytest.raises(ValueError, match="not a flat index"):
                index_files.load(right)
    finally:
        path.write_bytes(whole)
        manifest.write_bytes(said)


def ids_file(text: bytes, ends: list[int], *, count: int | None = None) -> bytes:
    return text + struct.pack(f"<{len(ends)}q", *ends) + FOOTER.pack(len(ends) if count is None else count, MARK)


TWENTY = list(range(1, 21))
IDS = {
    "json": json.dumps([f"d{i}" for i in range(20)]).encode(),
    "nothing": b"",
    "too few": ids_file(b"a", [1]),
    "many claimed": ids_file(b"a" * 20, TWENTY, count=1 << 60),
    "a negative number": ids_file(b"a" * 20, TWENTY, count=-20),
    "beyond the end": ids_file(b"a" * 20, [*TWENTY[:-1], 1 << 40]),
    "before the beginning": ids_file(b"a" * 20, [-5, *TWENTY[1:]]),
    "backwards": ids_file(b"a" * 20, [*TWENTY[:8], 3, *TWENTY[9:]]),
    "more text": ids_file(b"a" * 25, TWENTY),
    "no UTF-8": ids_file(b"\xff" * 20, TWENTY),
    "half a character": ids_file("é".encode() * 10, TWENTY),
}


@pytest.mark.parametrize("case", IDS)
def test_ids_of_a_forger_are_refused(case: str, right: Path, tmp_path: Path):
    copy = shutil.copytree(right, tmp_path / "copy")
    (copy / "versions" / "0" / "ids").write_bytes(IDS[case])
    rewrite(copy, lambda document: None)
    with pytest.raises(ValueError, match="ids"):
        index_files.load(copy)


@pytest.fixture(scope="module", params=["IVF8,Flat", "IVF8,SQfp16", "IVF8,PQ2x4", "HNSW4,Flat"])
def other_kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index") / "other"
    embedding = torch.randn(400, 4, generator=torch.Generator().manual_seed(0)).numpy()
    vectors = faiss.index_factory(4, request.param, faiss.METRIC_INNER_PRODUCT)
    vectors.train(embedding)
    vectors.add(embedding)
    manifest = Manifest("e", "w", "s", 0, 4, 400, factory=request.param, effort=2)
    Index(vectors, [f"d{i}" for i in range(400)], manifest).publish(folder)
    return folder


@pytest.mark.parametrize("mapped", [False, True])
@settings(max_examples=40)
@given(data=st.data())
def test_other_kinds_are_refused_or_read_within_their_size(mapped: bool, other_kind: Path, data: st.DataObject):
    """A forger who knows how checksums are made overwrites eight bytes anywhere before the lists."""
    path = other_kind / "versions" / "0" / "index.faiss"
    whole, said = path.read_bytes(), (path.parent / "manifest.json").read_bytes()
    before = faiss.get_deserialization_vector_byte_limit()
    try:
        place = data.draw(st.integers(0, min(len(whole) - 8, 2000)))
        path.write_bytes(whole[:place] + data.draw(st.binary(min_size=8, max_size=8)) + whole[place + 8 :])
        rewrite(other_kind, lambda document: None)
        try:
            index = index_files.load(other_kind, mapped=mapped)
        except (ValueError, FileNotFoundError) as error:
            assert str(other_kind) in str(error)
        else:
            assert len(index) == 400
    finally:
        path.write_bytes(whole)
        (path.parent / "manifest.json").write_bytes(said)
    assert faiss.get_deserialization_vector_byte_limit() == before
    index_files.load(other_kind, mapped=mapped)


@pytest.mark.parametrize("kind", [b"IxHe", b"Ix2L", b"IxRE", b"IxDI", b"IxM2", b"ilod", b"IxFI"])
def test_only_kinds_on_the_list_get_to_faiss(kind: bytes, other_kind: Path, monkeypatch: pytest.MonkeyPatch):
    path = other_kind / "versions" / "0" / "index.faiss"
    whole, said = path.read_bytes(), (path.parent / "manifest.json").read_bytes()
    monkeypatch.setattr(faiss, "read_index", lambda *arguments: pytest.fail("faiss reads it"))
    try:
        path.write_bytes(kind + whole[4:])
        rewrite(other_kind, lambda document: None)
        with pytest.raises(ValueError, match="of a kind"):
            index_files.load(other_kind)
    finally:
        path.write_bytes(whole)
        (path.parent / "manifest.json").write_bytes(said)


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
