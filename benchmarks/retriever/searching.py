"""How fast a search is through the framework: ``python -m benchmarks.retriever.searching``.

`Index.search` (ids, ties in order, never -1) against ``index.search`` of bare faiss, which gives rows, on the same
vectors, with the same k and lists visited; 32 queries at once, as a training step asks, and 256. Queries a second are
those of a stream of ``--queries`` different ones. "one call" is the same ratio of a single search after something else
has filled the caches (a full garbage collection), which a search through Python feels more than one in C++.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.retriever.measuring import in_turn, machine, median_ratio, options, report
from benchmarks.retriever.vectors import DIM, cached_mixture
from retriever.faiss_import import faiss
from retriever.index import Index
from retriever.manifest import Manifest

K = 10


def stream(search: Callable[..., object], batches: Sequence[Any]) -> None:
    for batch in batches:
        search(batch, k=K)


def compared(
    bare: Any, index: Index, query: Any, *, at_once: int, num_batches: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of each, over the first batches of the queries."""
    arrays = [query[at : at + at_once] for at in range(0, len(query), at_once)][:num_batches]
    cases = {
        "faiss": partial(stream, bare.search, arrays),
        "framework": partial(stream, index.search, [torch.from_numpy(array) for array in arrays]),
    }
    return in_turn(cases, rounds=rounds, warmup=2)


def main() -> None:
    parser = options("searching", __doc__.partition("\n")[0], rounds=15)
    parser.add_argument("--data", default="data/factbook", help="data set whose texts are embedded")
    parser.add_argument("--vectors", type=int, default=200_000, help="vectors in the index (default 200,000)")
    parser.add_argument("--queries", type=int, default=512, help="queries of a stream (default 512)")
    given = parser.parse_args()
    mixture = cached_mixture(given.data, given.folder)
    vectors, ids = mixture.draw(given.vectors, seed=1), [f"document-{i}" for i in range(given.vectors)]
    rows: list[dict[str, Any]] = []
    for factory, effort in (("Flat", 0), ("IVF1024,Flat", 32)):
        bare = faiss.index_factory(DIM, factory, faiss.METRIC_INNER_PRODUCT)
        if effort:
            bare.train(vectors[:40960])
            bare.nprobe = effort
        bare.add(vectors)
        index = Index(bare, ids, Manifest("e", "w", "s", 0, DIM, len(ids), factory=factory, effort=effort))
        for num_queries in (32, 256):
            query = mixture.draw(given.queries, seed=2)
            how = {"at_once": num_queries, "rounds": given.rounds}
            times = compared(bare, index, query, num_batches=len(query), **how)
            single = compared(bare, index, query, num_batches=1, **how)
            rows.append(
                {
                    "index": factory,
                    "queries at once": num_queries,
                    "faiss queries/s": len(query) / statistics.median(times["faiss"]),
                    "framework queries/s": len(query) / statistics.median(times["framework"]),
                    "ratio": median_ratio(times["faiss"], times["framework"]),
                    "one call": median_ratio(single["faiss"], single["framework"]),
                }
            )
    report(given, {"machine": machine(), "vectors": given.vectors}, rows, "searching")


if __name__ == "__main__":
    main()
