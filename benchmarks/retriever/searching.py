"""How fast a search is through the framework: ``python -m benchmarks.retriever.searching``.

`Index.search` (ids, ties in order, never -1) against ``index.search`` of bare faiss, which gives rows, on the same
vectors, with the same k and lists visited; 32 queries at once, as a training step asks, and 256.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch

from benchmarks.retriever.measuring import in_turn, machine, median_ratio, options, report
from benchmarks.retriever.vectors import DIM, cached_mixture
from retriever.faiss_import import faiss
from retriever.index import Index
from retriever.manifest import Manifest

K = 10


def main() -> None:
    parser = options("searching", __doc__.partition("\n")[0], rounds=15)
    parser.add_argument("--data", default="data/factbook", help="data set whose texts are embedded")
    parser.add_argument("--vectors", type=int, default=200_000, help="vectors in the index (default 200,000)")
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
            query = mixture.draw(num_queries, seed=2)
            tensor = torch.from_numpy(query)
            cases = {"faiss": partial(bare.search, query, K), "framework": partial(index.search, tensor, k=K)}
            times = in_turn(cases, rounds=given.rounds, warmup=2)
            rows.append(
                {
                    "index": factory,
                    "queries at once": num_queries,
                    "faiss queries/s": num_queries / statistics.median(times["faiss"]),
                    "framework queries/s": num_queries / statistics.median(times["framework"]),
                    "ratio": median_ratio(times["faiss"], times["framework"]),
                }
            )
    report(given, {"machine": machine(), "vectors": given.vectors}, rows, "searching")


if __name__ == "__main__":
    main()
