"""A million vectors, built, searched and compared with autofaiss: ``python -m benchmarks.retriever.million``.

The vectors are drawn from the distribution of real embeddings (`benchmarks.retriever.vectors`). Each system builds in
a process of its own from vectors on the disk, with the kind of index that it chooses itself (autofaiss within a tenth
more memory than the vectors take). Time is that of building (for the framework: training, filling, merging, tuning,
publishing; not embedding), memory the most anonymous memory beyond what the process had before, given as a share of
the file that was made. Recall@10 and queries a second are of the same 256 new queries, flat and index in turn.
autofaiss is not a dependency: ``--autofaiss PYTHON`` names an interpreter that has it (``python -m venv
--system-site-packages V; V/bin/pip install autofaiss --no-deps``, and what it asks for).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from rich.console import Console

from benchmarks.retriever.measuring import PeakMemory, in_turn, machine, median_ratio, options, report
from benchmarks.retriever.vectors import DIM, Vectors, cached_mixture
from retriever.config import IndexConfig
from retriever.faiss_import import faiss
from retriever.index import load
from retriever.index_build import IndexBuild
from retriever.manifest import Manifest

K, QUERIES = 10, 256


class VectorsBuild(IndexBuild):
    """The build of vectors that are in a file already."""

    def __init__(self, path: Path, config: IndexConfig) -> None:
        self._vectors = numpy.load(path, mmap_mode="r")
        self._query = numpy.load(path.with_name("tuning.npy"))
        count, dim = self._vectors.shape
        manifest = Manifest("given", "none", path.name, 0, dim, count)
        super().__init__(manifest, Numbered(count), config, console=Console(quiet=True))

    def embed_shard(self, shard: int, advance: Callable[[int], None] = lambda _: None) -> None:
        rows = self.shards.rows(shard)
        self.shards.write(shard, numpy.asarray(self._vectors[rows.start : rows.stop]), {})

    def queries(self) -> Vectors:
        return self._query

    def embedded(self) -> None:
        """Nothing to report."""


class Numbered(list[str]):
    """Ids that are not in memory."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Any:
        return (f"document-{i}" for i in range(self._count))


def build_framework(folder: Path) -> dict[str, Any]:
    build = VectorsBuild(folder / "vectors.npy", IndexConfig(dir=str(folder / "index"), recall_queries=QUERIES))
    build.folder.mkdir(parents=True, exist_ok=True)
    for shard in range(build.shards.num_shards):
        build.embed_shard(shard)
    memory, start = PeakMemory(), time.perf_counter()
    with memory.watched():
        build.run()
    took = time.perf_counter() - start
    file = folder / "index" / "versions" / "0" / "index.faiss"
    manifest = load(folder / "index", mapped=True).manifest
    return {
        "kind": manifest.factory, "seconds": took, "peak": memory.grown, "file": file.stat().st_size,
        "path": str(file), "effort": manifest.effort,
    }  # fmt: skip


def build_autofaiss(folder: Path) -> dict[str, Any]:
    from autofaiss import build_index

    json.dump = functools.partial(json.dump, default=float)  # it writes numpy's floats, too
    path = folder / "autofaiss.faiss"
    vectors = numpy.load(folder / "vectors.npy", mmap_mode="r")
    (folder / "parts").mkdir(exist_ok=True)
    numpy.save(folder / "parts" / "0.npy", vectors)
    limit = vectors.nbytes * 11 // 10  # room for the vectors themselves, as the framework's choice takes it
    del vectors
    memory, start = PeakMemory(), time.perf_counter()
    with memory.watched():
        _, described = build_index(
            str(folder / "parts"), index_path=str(path), index_infos_path=str(folder / "autofaiss.json"),
            metric_type="ip", max_index_memory_usage=f"{limit >> 20}MB", current_memory_available="8G", nb_cores=1,
        )  # fmt: skip
    return {
        "kind": str(described.get("index_key")), "seconds": time.perf_counter() - start, "peak": memory.grown,
        "file": path.stat().st_size, "path": str(path), "effort": 0, "set": str(described.get("index_param")),
    }  # fmt: skip


def in_process(python: str, system: str, folder: Path) -> dict[str, Any]:
    command = [python, "-m", "benchmarks.retriever.million", "--build", system, "--folder", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def searcher(folder: Path, built: dict[str, Any], system: str, query: Vectors) -> Callable[[], Any]:
    if system == "framework":
        index, tensor = load(folder / "index"), torch.from_numpy(query)
        return lambda: [[int(name.rpartition("-")[2]) for name in row] for row in index.search(tensor, k=K)[0]]
    other = faiss.read_index(built["path"])
    if built.get("set"):
        faiss.ParameterSpace().set_index_parameters(other, built["set"])
    return lambda: other.search(query, K)[1].tolist()


def main() -> None:
    parser = options("million", __doc__.partition("\n")[0])
    parser.add_argument("--data", default="data/factbook", help="data set whose texts are embedded")
    parser.add_argument("--vectors", type=int, default=1_000_000, help="vectors (default 1,000,000)")
    parser.add_argument("--autofaiss", default="", help="interpreter that has autofaiss (default: left out)")
    parser.add_argument("--build", choices=["framework", "autofaiss"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.build:
        print(json.dumps({"framework": build_framework, "autofaiss": build_autofaiss}[given.build](given.folder)))
        return
    mixture = cached_mixture(given.data, given.folder)
    folder = given.folder / f"million-{given.vectors}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    vectors, query = mixture.draw(given.vectors, seed=1), mixture.draw(QUERIES, seed=2)
    numpy.save(folder / "vectors.npy", vectors)
    numpy.save(folder / "tuning.npy", mixture.draw(QUERIES, seed=3))
    flat = faiss.IndexFlatIP(DIM)
    flat.add(vectors)
    del vectors
    right = flat.search(query, K)[1].tolist()
    systems = {"framework": sys.executable} | ({"autofaiss": given.autofaiss} if given.autofaiss else {})
    built = {name: in_process(python, name, folder) for name, python in systems.items()}
    rows: list[dict[str, Any]] = []
    for name, figures in built.items():
        search = searcher(folder, figures, name, query)
        found = search()
        times = in_turn({"flat": lambda: flat.search(query, K), name: search}, rounds=given.rounds)
        rows.append(
            {
                "system": name,
                "index": figures["kind"],
                "build s": figures["seconds"],
                "peak MB": figures["peak"] / 1e6,
                "file MB": figures["file"] / 1e6,
                "peak / file": figures["peak"] / figures["file"],
                "recall@10": statistics.mean(len(set(a) & set(b)) / K for a, b in zip(found, right, strict=True)),
                "queries/s": QUERIES / statistics.median(times[name]),
                "of flat's": median_ratio(times["flat"], times[name]),
            }
        )
    report(given, {"machine": machine(), "vectors": given.vectors}, rows, "million")


if __name__ == "__main__":
    main()
