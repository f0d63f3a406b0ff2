"""What opening a store of a million ids costs: ``python -m benchmarks.data.document_ids``.

Synthetic shard indices of 10,000 documents each. The id table is built from them and written once; then a fresh process
opens it and looks up 256 random ids at a time, and another one does the same with a dictionary of places, as the store
had before. Memory is what the process itself holds (anonymous pages) and what it has mapped of the file, which all
processes of a node share.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy

from benchmarks.data.measuring import machine, options, report
from data.document_table import FILE, DocumentTable, build_table
from data.shard_index import ShardIndex, key_hash

PER_SHARD, BATCH = 10_000, 256


def make_index(shard: int) -> ShardIndex:
    """As of a tar of documents of one kilobyte without pictures."""
    keys = [f"{shard * PER_SHARD + i}" for i in range(PER_SHARD)]
    encoded = [key.encode() for key in keys]
    count = numpy.arange(PER_SHARD, dtype=numpy.int64)
    return ShardIndex(
        tar=Path(f"shard-{shard:06d}.tar"), size=PER_SHARD * 1536, mtime_ns=0,
        sha256=hashlib.sha256(str(shard).encode()).hexdigest(), ignored={}, unread_bytes=0, unread_reason="",
        key_bytes=numpy.frombuffer(b"".join(encoded), dtype=numpy.uint8),
        key_ends=numpy.cumsum([len(key) for key in encoded], dtype=numpy.int64),
        key_hashes=numpy.array([key_hash(key) for key in keys], dtype=numpy.uint64), member_ends=count + 1,
        offsets=count * 1536 + 512, sizes=numpy.full(PER_SHARD, 1000, dtype=numpy.int64),
        extension_numbers=numpy.zeros(PER_SHARD, dtype=numpy.uint32), extensions=("json",),
        problem_numbers=numpy.zeros(PER_SHARD, dtype=numpy.uint8), problems=(),
    )  # fmt: skip


def memory() -> dict[str, float]:
    """Megabytes of this process: its own, and of mapped files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if "Rss" in line)
    return {name: int(lines[key].split()[0]) / 1024 for name, key in (("own", "RssAnon"), ("mapped", "RssFile"))}


def open_table(path: Path, way: str, count: int) -> None:
    """Print what opening costs, as JSON."""
    before, start = memory(), time.perf_counter()
    if way == "table":
        find = DocumentTable.open(path).find
    else:
        table = DocumentTable.open(path)
        ranges = (table.places(numpy.arange(i, min(i + PER_SHARD, count)))[0] for i in range(0, count, PER_SHARD))
        rows = (row for part in ranges for row in part.tolist())
        place = {name: tuple(row) for name, row in zip(table.ids(), rows, strict=True)}
        del table

        def find(ids: list[str]) -> Any:  # type: ignore[misc]
            return [place[name] for name in ids]

    opened = time.perf_counter() - start
    draw = random.Random(0)
    batches = [[str(draw.randrange(count)) for _ in range(BATCH)] for _ in range(400)]
    start = time.perf_counter()
    for batch in batches:
        find(batch)
    found = time.perf_counter() - start
    after = memory()
    grown = {name: after[name] - before[name] for name in after}
    print(json.dumps({"opened": opened, "find": 1e6 * found / (len(batches) * BATCH), **grown}))


def main() -> None:
    parser = options("document_ids", __doc__.partition("\n")[0], rounds=3)
    parser.add_argument("--count", type=int, default=1_000_000, help="documents (default a million)")
    parser.add_argument("--open", choices=("table", "dictionary"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    path = given.folder / "document_ids" / FILE
    if given.open:
        return open_table(path, given.open, given.count)
    path.parent.mkdir(parents=True, exist_ok=True)
    indices = [make_index(shard) for shard in range(given.count // PER_SHARD)]
    built = []
    for _ in range(given.rounds):
        start = time.perf_counter()
        build_table(indices).write(path)
        built.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows = []
    for way in ("table", "dictionary"):
        command = [sys.executable, "-m", "benchmarks.data.document_ids", "--open", way, "--count", str(given.count)]
        answers = [
            json.loads(subprocess.run([*command, "--folder", given.folder], check=True, capture_output=True).stdout)
            for _ in range(given.rounds)
        ]
        median = {name: float(numpy.median([answer[name] for answer in answers])) for name in answers[0]}
        rows.append(
            {
                "ids as": way,
                "s to build and write": float(numpy.median(built)) if way == "table" else "",
                "s to open": median["opened"],
                "MiB of the process": median["own"],
                "MiB mapped and touched": median["mapped"],
                "us to find an id": median["find"],
            }
        )
    results = {
        "machine": machine(),
        "documents": given.count,
        "file_bytes": path.stat().st_size,
        "build_peak_MiB": peak,
    }
    report(given, results, rows, f"{given.count} ids, a file of {path.stat().st_size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
