"""How fast tars are indexed: ``python -m benchmarks.data.indexing``.

Against reading the tar once, from the page cache or the disk, and against reading it and taking its SHA-256, which
an index needs in any case; the same headers by `tarfile` beside it. Two tars: pictures with captions as img2dataset
writes them, and texts of one kilobyte, where headers are a third of the file. Then what a folder of a thousand tars
costs to open and to hold.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy

from benchmarks.data.measuring import in_turn, machine, median_ratio, options, report
from data import shards
from data.shard_index import build_index
from data.shard_set import ShardSet
from data.tar_members import TarWalk

# Bytes of each member; the picture is the size of a 256 x 256 JPEG.
SHARDS: Mapping[str, tuple[int, Mapping[str, int]]] = {
    "pictures": (4_000, {"jpg": 30_000, "json": 600, "txt": 80}),
    "texts": (40_000, {"json": 1000}),
}


def make_tar(path: Path, num_samples: int, members: Mapping[str, int]) -> None:
    rng = numpy.random.default_rng(0)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for i in range(num_samples):
            for extension, size in members.items():
                info = tarfile.TarInfo(f"{i:09d}.{extension}")
                info.size = size
                archive.addfile(info, io.BytesIO(rng.bytes(size)))


def read(tar: Path) -> None:
    buffer = bytearray(4 << 20)
    with tar.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def walk(tar: Path) -> None:
    with tar.open("rb", buffering=0) as file:
        for _ in TarWalk(file):
            pass


def read_and_hash(tar: Path) -> None:
    with tar.open("rb", buffering=0) as file:
        hashlib.file_digest(file, "sha256")


def by_tarfile(tar: Path) -> None:
    with tarfile.open(tar, "r:") as archive:
        for _ in archive:
            pass


CASES: Mapping[str, Callable[[Path], object]] = {
    "read": read,
    "find members": walk,
    "read, SHA-256": read_and_hash,
    "index": build_index,
    "tarfile (no SHA-256)": by_tarfile,
}


def measure(tar: Path, what: str, *, rounds: int, cold: bool) -> list[dict[str, Any]]:
    times = in_turn({name: lambda case=case: case(tar) for name, case in CASES.items()}, rounds=rounds, cold=cold)
    size = tar.stat().st_size
    return [
        {
            "tar": what,
            "case": name,
            "GB/s": size / statistics.median(taken) / 1e9,
            "of reading": median_ratio(times["read"], taken),
            "of reading and SHA-256": median_ratio(times["read, SHA-256"], taken),
        }
        for name, taken in times.items()
    ]


def make_folder(folder: Path, *, num_shards: int, samples: int) -> None:
    """Indices as of ``num_shards`` tars of img2dataset; the tars themselves are holes of the right size."""
    make_tar(folder / "00000.tar", samples, {"jpg": 1, "json": 1, "txt": 1})
    index = shards.write_index(folder / "00000.tar")
    for i in range(1, num_shards):
        tar = folder / f"{i:05d}.tar"
        with tar.open("wb") as file:
            file.truncate(index.size)
        header = vars(index) | {"tar": tar, "mtime_ns": tar.stat().st_mtime_ns}
        shards.index_path(tar).write_bytes(type(index)(**header).to_bytes())


def open_folder(folder: Path) -> None:
    """Print seconds to open a folder, its samples, and the megabytes that this process has grown by."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    samples = ShardSet(folder)
    took = time.perf_counter() - start
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(took, len(samples), grown * 1024)


def main() -> None:
    parser = options("indexing", __doc__.partition("\n")[0])
    parser.add_argument("--shards", type=int, default=1000, help="tars of the folder that is opened (default 1000)")
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)  # for the process that measures its memory
    given = parser.parse_args()
    if given.open:
        return open_folder(given.open)
    given.folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"machine": machine(), "cold": given.cold}
    rows: list[dict[str, Any]] = []
    for what, (num_samples, members) in SHARDS.items():
        tar = given.folder / f"{what}.tar"
        if not tar.exists():
            make_tar(tar.with_suffix(".making"), num_samples, members)
            tar.with_suffix(".making").rename(tar)
        rows += measure(tar, what, rounds=given.rounds, cold=given.cold)
    folder = given.folder / f"folder-{given.shards}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=given.folder) as making:
            make_folder(Path(making), num_shards=given.shards, samples=10_000)
            Path(making).rename(folder)
            Path(making).mkdir()  # for the context to remove
    command = [sys.executable, "-m", "benchmarks.data.indexing", "--open", str(folder)]
    opened = [subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() for _ in range(3)]
    results["opening"] = {
        "shards": given.shards,
        "samples": int(opened[0][1]),
        "seconds": [float(one[0]) for one in opened],
        "bytes": int(opened[0][2]),
    }
    report(given, results, rows, "indexing")
    opening = results["opening"]
    print(
        f"a folder of {opening['shards']} shards, {opening['samples']} samples: opened in "
        f"{statistics.median(opening['seconds']):.2f} s, {opening['bytes'] / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    main()
