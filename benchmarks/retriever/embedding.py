"""How fast the build job embeds: ``python -m benchmarks.retriever.embedding``.

Its stage of embedding (read documents, make features, forward, seal the shard) against the encoder's forward
alone over the same batches, whose features were made before. The text tower is all-MiniLM-L6-v2, over the factbook's
documents without their pictures.
"""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.retriever.measuring import in_turn, machine, median_ratio, options, report
from benchmarks.retriever.vectors import minilm_folder
from data.dataset import Dataset
from retriever.build import fresh_encoder
from retriever.build_job import BuildJob
from retriever.config import IndexConfig, RetrieverConfig
from retriever.embed import stored_features


def main() -> None:
    parser = options("embedding", __doc__.partition("\n")[0])
    parser.add_argument("--data", default="data/factbook", help="the data set (default data/factbook)")
    parser.add_argument("--documents", type=int, default=512, help="documents embedded (default 512)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dataset = Dataset(given.data)
    config = RetrieverConfig(text="transformers", text_model=str(minilm_folder()), image="none", text_max_tokens=64)
    encoder = fresh_encoder(config, dataset, image_size=24, seed=0).eval()
    folder = Path(given.folder) / "embedding"
    shutil.rmtree(folder, ignore_errors=True)
    index = IndexConfig(dir=str(folder), shard_size=given.documents, batch_size=64)
    job = BuildJob(encoder, dataset, index, image_size=24, console=Console(quiet=True))
    job.folder.mkdir(parents=True)
    ids = dataset.store.ids[: len(job.shards.rows(0))]
    batches = [
        stored_features(encoder, dataset.store, ids[start : start + 64], image_size=24)
        for start in range(0, len(ids), 64)
    ]

    @torch.no_grad()
    def forward() -> None:
        for batch in batches:
            encoder(batch)

    times = in_turn({"forward alone": forward, "build job": lambda: job.embed_shard(0)}, rounds=given.rounds)
    rows = [
        {
            "case": name,
            "documents/s": len(ids) / statistics.median(taken),
            "of forward alone": median_ratio(times["forward alone"], taken),
        }
        for name, taken in times.items()
    ]
    report(given, {"machine": machine(), "documents": len(ids)}, rows, "embedding")


if __name__ == "__main__":
    main()
