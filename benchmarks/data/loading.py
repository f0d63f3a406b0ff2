"""Samples a second of this loader, against reading files and decoding alone, and against other loaders.

    python -m benchmarks.data.peers --make /tmp/peers
    python -m benchmarks.data.loading --peers /tmp/peers

The same JPEG pictures, the same decode work (JPEG to 64 x 64, JSON parsed), one process. *plain*: each tar is read as a
whole and members are cut out at known offsets. *webdataset*: its own reader, pipeline and grouping, no shuffle. Ours is
`data.loader.Loader` in batches of 256, in order, and in the two-level order. Cold: the shards' pages are dropped from
the page cache before the epoch (which a host's own cache, where the machine is a virtual one, may not notice).
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.data import peers
from benchmarks.data.measuring import machine, median_ratio, options, report
from benchmarks.data.pictures import decode, make
from data.cursor import Batches, Stream
from data.loader import Loader
from data.order import Order, Sequential
from data.shard_set import RawSample, ShardSet

BATCH = 256
ORDER = {"chunk": 256, "window": 64 * 256}


def decode_sample(sample: RawSample) -> object:
    return decode(sample.members)


def ours(folder: Path, stream: Stream, *, workers: int = 0) -> int:
    """Read an epoch; the number of samples."""
    batches = -(-stream.num_samples // BATCH)
    loader = Loader(
        functools.partial(ShardSet, folder, max_open_files=160), Batches(stream, BATCH, "pad"), decode=decode_sample,
        num_workers=workers, stop=batches,
    )  # fmt: skip
    return sum(int(batch.weights.sum()) for batch in loader)


def plain(folder: Path) -> int:
    """Each tar in one read, members cut out where the index says."""
    count = 0
    for index in ShardSet(folder).indices:
        data = index.tar.read_bytes()
        for row in range(len(index)):
            decode({name: data[offset : offset + size] for name, (offset, size) in index.members(row).items()})
            count += 1
    return count


def webdataset_reader(folder: Path) -> int:
    """webdataset's own pipeline over the same tars."""
    import webdataset

    urls = [str(tar) for tar in sorted(folder.glob("*.tar"))]
    dataset = webdataset.WebDataset(urls, shardshuffle=False, empty_check=False).map(decode)
    return sum(1 for _ in dataset)


def forget(folders: Iterable[Path]) -> None:
    """Drop the files' pages from the page cache."""
    os.sync()
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)


def measure(cases: dict[str, Callable[[], tuple[float, int]]], *, rounds: int) -> dict[str, list[float]]:
    """Samples a second of each case in each round, the cases in turn."""
    speeds: dict[str, list[float]] = {name: [] for name in cases}
    for round_ in range(1 + rounds):
        for name, work in cases.items():
            seconds, count = work()
            if round_:
                speeds[name].append(count / seconds if count else math.nan)
            print(
                f"round {round_} of {rounds}: {name}: {count / seconds if count else math.nan:.0f} samples/s",
                flush=True,
            )
    return speeds


def timed(work: Callable[[], int], expected: int, *, cold: tuple[Path, ...] = ()) -> Callable[[], tuple[float, int]]:
    def run() -> tuple[float, int]:
        if cold:
            forget(cold)
        start = time.perf_counter()
        count = work()
        took = time.perf_counter() - start
        assert count == expected, f"{count} samples were read instead of {expected}"
        return took, count

    return run


def main() -> None:
    parser = options("loading", "samples a second of loaders on the same pictures", rounds=5)
    parser.add_argument("--samples", type=int, default=20_480, help="pictures (default 20480)")
    parser.add_argument("--per-shard", type=int, default=1024, help="pictures of a shard (default 1024)")
    parser.add_argument("--peers", type=Path, help="environment made by benchmarks.data.peers --make")
    given = parser.parse_args()
    folder = make(given.folder, samples=given.samples, per_shard=given.per_shard)
    num, work = given.samples, given.folder / f"peers-{given.samples}"
    in_order, shuffled = Sequential(num, "benchmark"), Order(num, "benchmark", 0, **ORDER)
    both = [("plain reads and decode", functools.partial(plain, folder)),
            ("webdataset, in order", functools.partial(webdataset_reader, folder)),
            ("ours, in order", functools.partial(ours, folder, in_order)),
            ("ours, shuffled", functools.partial(ours, folder, shuffled))]  # fmt: skip
    cases = {f"{name}, warm": timed(run, num) for name, run in both}
    cases |= {f"{name}, cold": timed(run, num, cold=(folder,)) for name, run in both}
    cases["ours, shuffled, 2 workers, warm"] = timed(functools.partial(ours, folder, shuffled, workers=2), num)
    notes: dict[str, str] = {}
    started: dict[str, peers.Peer] = {}
    if given.peers is not None:
        for name in peers.NAMES:
            for shuffle in (False, True):
                label = f"{name}, {'shuffled' if shuffle else 'in order'}, warm"
                started[label] = peers.Peer(given.peers, name, folder, work, shuffle=shuffle)
                cases[label] = started[label].epoch
    speeds = measure(cases, rounds=given.rounds)
    rows: list[dict[str, Any]] = []
    for name, found in speeds.items():
        peer = started.get(name)
        if peer is not None:
            notes[name] = peer.problem or ""
            peer.close()
        cache = "cold" if name.endswith("cold") else "warm"
        sequential = speeds[f"ours, in order, {cache}"]
        rows.append(
            {
                "reader": name,
                "samples/s": statistics.median(found),
                "of plain": median_ratio(found, speeds[f"plain reads and decode, {cache}"]),
                "of webdataset": median_ratio(found, speeds[f"webdataset, in order, {cache}"]),
                "of ours in order": median_ratio(found, sequential),
                "note": notes.get(name, ""),
            }
        )
    results = {"machine": machine(), "samples": num, "shards": -(-num // given.per_shard), "order": ORDER}
    report(given, results, rows, f"Samples a second, {num} pictures in {results['shards']} shards")


if __name__ == "__main__":
    main()
