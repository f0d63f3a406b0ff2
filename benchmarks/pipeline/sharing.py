"""Documents encoded once against at every occurrence: time and memory by how often a document is used.

    python -m benchmarks.pipeline.sharing [--rounds N] [--out FILE]

First one process, a document tower of 4 layers, 16 samples with 8 documents each; sharing factor f means 128 / f
different documents. Forward and backward of scores against a query, gradients compared. Then the reader's pictures on
two ranks (`benchmarks.pipeline.pictures`), whose results go to ``pictures.json`` beside FILE.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pipeline import pictures
from benchmarks.pipeline.measuring import LiveBytes, in_turn, machine, median_ratio, options, report
from benchmarks.pipeline.models import Layer
from pipeline.heap import keep_freed_memory
from tests.distributed import run_on_ranks

SAMPLES, DOCUMENTS, LENGTH, WIDTH, VOCABULARY, LAYERS = 16, 8, 32, 128, 2000, 4
FACTORS = (1, 2, 4, 8)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(*(Layer(WIDTH) for _ in range(LAYERS)))

    def forward(self, ids_UL: Tensor) -> Tensor:
        return self.layers(self.table(ids_UL)).mean(1)


def on_rank(rounds: int) -> list[dict[str, Any]]:
    keep_freed_memory()  # as training ranks do
    torch.manual_seed(0)
    tower = Tower()
    query_BD = torch.randn(SAMPLES, WIDTH)
    total = SAMPLES * DOCUMENTS
    rows = []
    for factor in FACTORS:
        documents_UL = torch.randint(VOCABULARY, (total // factor, LENGTH))
        used_BK = torch.arange(total).remainder(total // factor).view(SAMPLES, DOCUMENTS)

        def once(documents: Tensor = documents_UL, used: Tensor = used_BK) -> Tensor:
            return tower(documents)[used]

        def each_time(documents: Tensor = documents_UL, used: Tensor = used_BK) -> Tensor:
            return tower(documents[used.flatten()]).unflatten(0, used.shape)

        def step(encode: Callable[[], Tensor]) -> list[Tensor]:
            tower.zero_grad(set_to_none=True)
            scores_BK = torch.einsum("bd,bkd->bk", query_BD, encode())
            scores_BK.logsumexp(1).sum().backward()
            return [p.grad for p in tower.parameters() if p.grad is not None]

        gradients = [[g.clone() for g in step(encode)] for encode in (once, each_time)]
        error = max(
            float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) for a, b in zip(*gradients, strict=True)
        )
        peaks = []
        for encode in (once, each_time):
            tower.zero_grad(set_to_none=True)
            with LiveBytes() as live:
                step(encode)
            peaks.append(live.peak)
        times = in_turn({"once": lambda: step(once), "each": lambda: step(each_time)}, rounds=rounds)
        rows.append(
            {
                "factor": factor,
                "once ms": 1e3 * statistics.median(times["once"]),
                "each time ms": 1e3 * statistics.median(times["each"]),
                "time ratio": median_ratio(times["each"], times["once"]),
                "once MiB": peaks[0] / 2**20,
                "each time MiB": peaks[1] / 2**20,
                "memory ratio": peaks[1] / peaks[0],
                "gradient error": f"{error:.1e}",
            }
        )
    return rows


def main() -> None:
    given = options("sharing", "documents encoded once against at every occurrence")
    rows = run_on_ranks(on_rank, 1, given.rounds, timeout_s=1800)[0]
    report(given, {"machine": machine()}, rows, "Documents encoded once, against at every occurrence")
    where = machine()
    rows = run_on_ranks(pictures.on_rank, pictures.RANKS, given.rounds, timeout_s=1800)[0]
    beside = Namespace(**{**vars(given), "out": given.out.with_name("pictures.json")})
    report(beside, {"machine": where}, rows, "Pictures of the reader, 2 ranks")


if __name__ == "__main__":
    main()
