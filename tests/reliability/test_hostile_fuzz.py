"""Fuzzing of what examples cannot list: pickles in any place, pictures of any claimed size, any path."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import shutil
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data import images
from data.command_line import parse
from data.decoding import DECODERS, decode
from data.shard_set import RawSample
from rag_mm import checkpoint
from rag_mm.config import Config
from retriever import checkpoint_files
from retriever import index as index_files
from tests.reliability.test_hostile_files import make_checkpoint
from tests.retriever.test_index import make

BESIDE = (".metadata", "__0_0.distcp", "model.pt", "x.pkl", "a.safetensors", "ids.json")


class Trap:
    """Leaves a mark when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint and an index, whole."""
    folder = tmp_path_factory.mktemp("artefacts")
    make_checkpoint(folder)
    index, _ = make()
    index.publish(folder / "index")
    return folder


def put(kind: str, protocol: int, marker: Path) -> bytes:
    trap = pickle.dumps(Trap(marker), protocol=protocol)
    if kind == "torch":
        path = marker.with_suffix(".pt")
        torch.save(Trap(marker), path, pickle_protocol=max(2, protocol))
        return path.read_bytes()
    return {"plain": trap, "compressed": zlib.compress(trap), "after JSON": b'{"a": 1}\n' + trap}[kind]


@settings(max_examples=60)
@given(
    kind=st.sampled_from(["plain", "compressed", "after JSON", "torch"]),
    protocol=st.integers(0, pickle.HIGHEST_PROTOCOL),
    data=st.data(),
)
def test_a_pickle_in_place_of_any_file_or_beside_it_never_runs(
    kind: str, protocol: int, data: st.DataObject, artefacts: Path, tmp_path_factory: pytest.TempPathFactory
):
    folder = tmp_path_factory.mktemp("copy")
    run, marker = folder / "run", folder / "marker"
    shutil.copytree(artefacts, run)
    files = sorted(path for path in run.rglob("*") if path.is_file())
    target = data.draw(st.sampled_from(files))
    if data.draw(st.booleans()):
        name = data.draw(
            st.sampled_from([".metadata", "__0_0.distcp", "model.pt", "x.pkl", "a.safetensors", "ids.json"])
        )
        target = target.with_name(name)
    target.write_bytes(put(kind, protocol, marker))
    for read in (
        lambda: checkpoint.newest_usable(run),
        lambda: checkpoint.load(run, 4, {"reader.a": torch.zeros(6)}),
        lambda: checkpoint_files.load_tensors(
            {"reader.a": torch.zeros(6)}, checkpoint.checkpoint_dir(run, 4), no_dist=True
        ),
        lambda: index_files.load(run / "index"),
    ):
        try:
            read()
        except (ValueError, OSError):
            continue
        except Exception as error:  # safetensors has an error of its own, which `verify` keeps from users
            assert type(error).__name__ == "SafetensorError", error
    assert not marker.exists()
    shutil.rmtree(folder)


@settings(max_examples=40)
@given(kind=st.sampled_from(["plain", "compressed", "after JSON"]), protocol=st.integers(0, 5), data=st.data())
def test_a_pickle_in_a_shard_never_runs(
    kind: str, protocol: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
):
    marker = tmp_path_factory.mktemp("shard") / "marker"
    extension = data.draw(st.sampled_from([*sorted(DECODERS), "pkl", "pt", "pth", "npy"]))
    decode(RawSample("k", {extension: put(kind, protocol, marker)}, Path("t.tar")))
    assert not marker.exists()


def claims(kind: str, width: int, height: int) -> bytes:
    """The beginning of a picture that says it is so large, and holds nothing."""
    if kind == "png":

        def chunk(name: bytes, body: bytes) -> bytes:
            return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    if kind == "gif":
        return b"GIF89a" + struct.pack("<HHBBB", width & 0xFFFF, height & 0xFFFF, 0xF7, 0, 0) + bytes(768) + b",;"
    if kind == "bmp":
        body = struct.pack("<IiiHHIIiiII", 40, width & 0x7FFFFFFF, height & 0x7FFFFFFF, 1, 24, 0, 0, 0, 0, 0, 0)
        return b"BM" + struct.pack("<IHHI", 54 + 40, 0, 0, 54) + body
    frame = struct.pack(">HBHHB", 17, 8, height & 0xFFFF, width & 0xFFFF, 3) + bytes((1, 17, 0, 2, 17, 1, 3, 17, 1))
    return b"\xff\xd8\xff\xc0" + frame + b"\xff\xda\x00\x0c\x03\x01\x00\x02\x11\x03\x11\x00\x3f\x00" + b"\xff\xd9"


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@settings(max_examples=80)
@given(
    kind=st.sampled_from(["png", "gif", "bmp", "jpg"]),
    width=st.integers(1, 2**31 - 1),
    height=st.integers(1, 2**31 - 1),
)
@example(kind="png", width=2**31 - 1, height=1)
@example(kind="gif", width=65535, height=65535)
@example(kind="jpg", width=65535, height=65535)
def test_a_claimed_size_costs_no_memory(kind: str, width: int, height: int):
    picture = claims(kind, width, height)
    before = peak_kib()
    tracemalloc.start()
    try:
        images.decode(picture, 4)
    except ValueError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 200 << 20 and peak_kib() - before < 400 << 10


def peak_kib() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1])


PATHS = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        ["../../../etc", "/dev/zero", "/proc/self/mem", "~", "$HOME", "a\0b", "x" * 5000, "\udcff", "file:///etc"]
    ),
)


@settings(max_examples=60)
@given(field=st.sampled_from(["run_dir", "data.dir", "index.dir", "data.cache_dir", "parallel.plan"]), path=PATHS)
def test_any_path_is_a_configuration_or_one_sentence(field: str, path: str):
    """Reading a configuration touches no path in it, and what it says is one line."""
    before, said = set(Path.cwd().iterdir()), io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            assert isinstance(parse(Config, [f"--{field}={path}"], prog="p", description="d"), Config)
        except SystemExit as end:
            assert end.code == 2 and said.getvalue().count("\n") == 1 and "Traceback" not in said.getvalue()
    assert set(Path.cwd().iterdir()) == before
