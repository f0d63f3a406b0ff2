"""Random reads of documents by id: ``python -m benchmarks.data.documents [--peers FOLDER]``.

Batches of 256 random ids of 200,000 documents of about half a kilobyte in 20 tars. The store against a loop of
``pread`` at offsets from a dictionary, with the same decode work (JSON, and the checked `Document`), with JSON alone,
and with no decode work; and against other libraries, each in its own process (`benchmarks.data.document_peers`). Every
batch is of other documents, so that no case finds bytes in the processor's cache that another one brought there.
"""

from __future__ import annotations

import gc
import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy

from benchmarks.data.document_peers import NAMES, Peer
from benchmarks.data.measuring import empty_page_cache, machine, median_ratio, options, report
from data.document import Document, to_sample
from data.document_store import DocumentStore
from data.shards import load_index, shard_paths, write_shards

COUNT, BATCH = 200_000, 256
BATCHES = {False: 20, True: 2}  # a round has so many, warm and cold
SAMPLES_PER_SHARD = 10_000


def make_documents() -> Iterator[Document]:
    draw = random.Random(0)
    words = [f"word{i}" for i in range(5000)]
    for i in range(COUNT):
        passage = " ".join(draw.choices(words, k=60))
        yield Document(f"d{i:07d}", f"Title {i}", {"capital": f"City {i}"}, passage=passage)


class Bare:
    """A loop of ``pread``: what anybody would write who knows the offsets."""

    def __init__(self, directory: Path) -> None:
        self.place: dict[str, tuple[int, int, int]] = {}
        for tar in shard_paths(directory):
            descriptor = os.open(tar, os.O_RDONLY)
            for name, members in load_index(tar).samples.items():
                self.place[name] = (descriptor, *members["json"])

    def documents(self, ids: Sequence[str]) -> list[Document]:
        found = []
        for name in ids:
            descriptor, offset, size = self.place[name]
            body = json.loads(os.pread(descriptor, size, offset))
            image, passage = None, body.get("passage", "")
            found.append(Document(name, body["title"], body["fields"], image, body["meta"], passage))
        return found

    def json(self, ids: Sequence[str]) -> list[Any]:
        found = []
        for name in ids:
            descriptor, offset, size = self.place[name]
            found.append(json.loads(os.pread(descriptor, size, offset)))
        return found

    def bytes(self, ids: Sequence[str]) -> list[bytes]:
        found = []
        for name in ids:
            descriptor, offset, size = self.place[name]
            found.append(os.pread(descriptor, size, offset))
        return found


def main() -> None:
    parser = options("documents", __doc__.partition("\n")[0])
    parser.add_argument("--peers", type=Path, help="environment made by benchmarks.data.document_peers --make")
    given = parser.parse_args()
    shards = given.folder / "documents"
    if not shards.exists():
        write_shards(shards, map(to_sample, make_documents()), samples_per_shard=SAMPLES_PER_SHARD)
    store, bare = DocumentStore(shards), Bare(shards)
    peers = {name: Peer(given.peers, name, shards, given.folder / "peers") for name in NAMES} if given.peers else {}
    names, draw, batches = list(store.ids), random.Random(1), BATCHES[given.cold]

    def timed(read: Callable[[Sequence[str]], object]) -> Callable[[list[int]], float]:
        def seconds(places: list[int]) -> float:
            ids = [names[i] for i in places]
            start = time.perf_counter()
            read(ids)
            return time.perf_counter() - start

        return seconds

    cases: dict[str, Callable[[list[int]], float]] = {
        "fetch": timed(store.fetch),
        "pread, same decode": timed(bare.documents),
        "pread, JSON only": timed(bare.json),
        "pread, no decode": timed(bare.bytes),
    }
    for name, peer in peers.items():
        cases[name] = lambda places, peer=peer: peer.read(places, [f"Title {i}" for i in places])  # type: ignore[misc]
    places = draw.sample(range(COUNT), BATCH)
    assert store.fetch([names[i] for i in places]) == bare.documents([names[i] for i in places])
    times: dict[str, list[float]] = {name: [] for name in cases}
    for round_ in range(1 + given.rounds):
        for name, case in cases.items():
            slow = False
            if not given.cold:  # one unmeasured, which brings the case's own code and tables into the processor's cache
                slow = case(draw.sample(range(COUNT), BATCH)) > 1
            gc.collect()
            taken, count = 0.0, 1 if slow else batches
            for _ in range(count):
                if given.cold:
                    if name in peers:
                        peers[name].unmap()
                    empty_page_cache()
                taken += case(draw.sample(range(COUNT), BATCH))
            if round_:
                times[name].append(taken / count)
    rows = [
        {
            "way": name,
            "us a document": 1e6 * statistics.median(taken) / BATCH,
            "fetch's speed relative to it": median_ratio(taken, times["fetch"]),
            "lowest round": min((a / b for a, b in zip(taken, times["fetch"], strict=True)), default=math.nan),
            "problem": peers[name].problem or "" if name in peers else "",
        }
        for name, taken in times.items()
    ]
    for peer in peers.values():
        peer.close()
    results = {"machine": machine(), "cold": given.cold, "numpy": numpy.__version__}
    report(given, results, rows, f"Documents by id, {BATCH} at a time, {'cold' if given.cold else 'warm'} page cache")


if __name__ == "__main__":
    main()
