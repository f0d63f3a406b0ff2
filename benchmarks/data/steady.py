"""Memory and open files over a million shuffled reads: ``python -m benchmarks.data.steady``.

Small samples in 200 tars, more than are kept open; two-level order; batches of 256. Resident memory is taken after a
first epoch and then at every tenth of the way; what counts is that it does not grow.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.data.measuring import machine, options, report
from data.cursor import Batches
from data.loader import Loader
from data.order import Order
from data.shard_set import RawSample, ShardSet
from data.shards import write_shards

BATCH = 256


def length(sample: RawSample) -> int:
    return len(sample.members["txt"])


def make(folder: Path, *, samples: int, per_shard: int) -> Path:
    target = folder / f"texts-{samples}-{per_shard}"
    if not (target / "done").exists():
        texts = ((f"{i:07d}", {"txt": f"text number {i} ".encode() * (1 + i % 40)}) for i in range(samples))
        write_shards(target, texts, samples_per_shard=per_shard)
        (target / "done").touch()
    return target


def resident_mib() -> float:
    """Resident memory of this process now (MiB)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(folder: Path, *, samples: int, reads: int, max_open_files: int) -> Iterator[dict[str, Any]]:
    shards = ShardSet(folder, max_open_files=max_open_files)
    batches = Batches(Order(samples, shards.fingerprint, 0, chunk=64, window=64 * 64), BATCH)
    loader = Loader(lambda: shards, batches, decode=length)
    warm, total = samples // BATCH, (samples + reads) // BATCH
    start, most = time.perf_counter(), 0
    for batch in loader:
        most = max(most, len(os.listdir("/proc/self/fd")) if batch.n % 50 == 0 else 0)
        done = batch.n + 1 - warm
        if done >= 0 and done % ((total - warm) // 10) == 0:
            yield {
                "reads": done * BATCH,
                "resident MiB": resident_mib(),
                "most open files of the process": most,
                "samples/s": (batch.n + 1) * BATCH / (time.perf_counter() - start),
            }
        if batch.n + 1 == total:
            return


def main() -> None:
    parser = options("steady", "memory and open files over a million reads", rounds=1)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--reads", type=int, default=1_000_000)
    parser.add_argument("--max-open-files", type=int, default=64)
    given = parser.parse_args()
    folder = make(given.folder, samples=given.samples, per_shard=given.samples // 200)
    rows = list(measure(folder, samples=given.samples, reads=given.reads, max_open_files=given.max_open_files))
    growth = rows[-1]["resident MiB"] - rows[0]["resident MiB"]
    results = {"machine": machine(), "growth MiB": growth, "max_open_files": given.max_open_files}
    report(given, results, rows, f"{given.reads:,} reads; memory grew by {growth:.1f} MiB")


if __name__ == "__main__":
    main()
