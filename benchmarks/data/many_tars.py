"""Documents by id out of more tars than may be open: ``python -m benchmarks.data.many_tars [--peers FOLDER]``.

A memory of 21 million passages lies in over a thousand tars, and whoever reads it may keep a bounded number of them
open: a job has a limit on descriptors, and a parallel file system one on open files of a client. So here both sides
keep 128 of 1,024 tars open: the store, a loop of ``pread`` that closes the least recently used descriptor, and wids;
and wids with all tars open, which is its best case and needs a limit as large as the number of tars. The tars are small
(250 documents each), in wids' favour: it indexes a tar anew whenever it opens it, the longer the larger the tar is.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import random
import resource
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.data.document_peers import Peer
from benchmarks.data.documents import make_documents
from benchmarks.data.measuring import empty_page_cache, machine, median_ratio, options, report
from data.document import Document, to_sample
from data.document_store import DocumentStore
from data.shards import load_index, shard_paths, write_shards

TARS, DOCUMENTS_PER_TAR, OPEN, BATCH = 1024, 250, 128, 256
WIDS = ("wids, 128 tars open", "wids")


class Bounded:
    """A loop of ``pread`` at known offsets that keeps a bounded number of files open."""

    def __init__(self, directory: Path) -> None:
        self.tars = shard_paths(directory)
        self.place = {
            name: (number, *members["json"])
            for number, tar in enumerate(self.tars)
            for name, members in load_index(tar).samples.items()
        }
        self.open: OrderedDict[int, int] = OrderedDict()

    def documents(self, ids: Sequence[str]) -> list[Document]:
        found = []
        for name in ids:
            tar, offset, size = self.place[name]
            if tar in self.open:
                self.open.move_to_end(tar)
            else:
                if len(self.open) == OPEN:
                    os.close(self.open.popitem(last=False)[1])
                self.open[tar] = os.open(self.tars[tar], os.O_RDONLY)
            body = json.loads(os.pread(self.open[tar], size, offset))
            found.append(Document(name, body["title"], body["fields"], None, body["meta"], body.get("passage", "")))
        return found


def documents() -> Iterator[Document]:
    """As many as are needed, those of `benchmarks.data.documents` over and over under other ids."""
    for i, document in enumerate(itertools.islice(itertools.cycle(make_documents()), TARS * DOCUMENTS_PER_TAR)):
        yield Document(f"d{i:07d}", f"Title {i}", document.fields, passage=document.passage)


def main() -> None:
    parser = options("many_tars", __doc__.partition("\n")[0])
    parser.add_argument("--peers", type=Path, help="environment made by benchmarks.data.document_peers --make")
    given = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * TARS)), hard))  # for the peer with all open
    shards = given.folder / "many_tars"
    if not shards.exists():
        write_shards(shards, map(to_sample, documents()), samples_per_shard=DOCUMENTS_PER_TAR)
    store, bare = DocumentStore(shards, max_open_files=OPEN), Bounded(shards)
    work = given.folder / "many_tars_peers"
    peers = {name: Peer(given.peers, name, shards, work) for name in WIDS} if given.peers else {}
    names, draw = list(store.ids), random.Random(1)

    def timed(read: Callable[[Sequence[str]], object]) -> Callable[[list[int]], float]:
        def seconds(places: list[int]) -> float:
            ids = [names[i] for i in places]
            start = time.perf_counter()
            read(ids)
            return time.perf_counter() - start

        return seconds

    cases: dict[str, Callable[[list[int]], float]] = {
        "fetch, 128 tars open": timed(store.fetch),
        "pread, same decode, 128 tars open": timed(bare.documents),
    }
    for name, peer in peers.items():
        cases[name] = lambda places, peer=peer: peer.read(places, [f"Title {i}" for i in places])  # type: ignore[misc]
    first = "fetch, 128 tars open"
    places = draw.sample(range(len(names)), BATCH)
    assert store.fetch([names[i] for i in places]) == bare.documents([names[i] for i in places])
    times: dict[str, list[float]] = {name: [] for name in cases}
    for round_ in range(1 + given.rounds):
        for name, case in cases.items():
            slow = not given.cold and case(draw.sample(range(len(names)), BATCH)) > 0.2
            gc.collect()
            taken, count = 0.0, 1 if slow or given.cold else 10
            for _ in range(count):
                if given.cold:
                    if name in peers:
                        peers[name].unmap()
                    empty_page_cache()
                taken += case(draw.sample(range(len(names)), BATCH))
            if round_:
                times[name].append(taken / count)
    rows = [
        {
            "way": "wids, all 1,024 tars open" if name == "wids" else name,
            "us a document": 1e6 * statistics.median(taken) / BATCH,
            "fetch's speed relative to it": median_ratio(taken, times[first]),
            "lowest round": min((a / b for a, b in zip(taken, times[first], strict=True)), default=math.nan),
            "problem": peers[name].problem or "" if name in peers else "",
        }
        for name, taken in times.items()
    ]
    for peer in peers.values():
        peer.close()
    results = {"machine": machine(), "cold": given.cold, "tars": TARS, "documents": len(names)}
    report(given, results, rows, f"Documents out of {TARS} tars, {'cold' if given.cold else 'warm'} page cache")


if __name__ == "__main__":
    main()
