"""What a build will take, said before it is begun: time, memory and disk, from a few batches and the sizes.

The encoder's speed and that of a matrix product are measured on this machine as it is now; the rest follows from the
factory string. A graph's time is a guess (faiss has no formula for it), so it is left out and said to be.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy
import torch

from retriever.build_job import BuildJob
from retriever.embed import stored_features

ITERATIONS = 10  # of k-means, as faiss has it for lists
BATCHES = 4


@dataclass(frozen=True)
class Estimate:
    """What a build job will take.

    Attributes:
        documents_per_s: that one rank embeds.
        embed_s, train_s, fill_s: of the stages, with all ranks.
        memory_bytes: largest of the stages, of one rank, beside the program and its encoder.
        folder_bytes: of the files on the way, removed at the end.
        index_bytes: of the new version.
    """

    documents_per_s: float
    embed_s: float
    train_s: float
    fill_s: float
    memory_bytes: int
    folder_bytes: int
    index_bytes: int

    @property
    def seconds(self) -> float:
        return self.embed_s + self.train_s + self.fill_s

    def text(self, job: BuildJob) -> str:
        """Lines to read."""
        manifest, ranks = job.manifest, job.ranks.count
        graph = "; the graph takes more time, which is not in this" if "HNSW" in job.factory else ""
        return (
            f"{manifest.count} documents x {manifest.dim}, {job.factory}, {job.shards.num_shards} shards, "
            f"{ranks} ranks\n"
            f"time    {_duration(self.seconds)}: embedding {_duration(self.embed_s)} at {self.documents_per_s:.0f} "
            f"documents/s a rank, training {_duration(self.train_s)}, filling {_duration(self.fill_s)}{graph}\n"
            f"memory  {_size(self.memory_bytes)} a rank, beside the program and its encoder\n"
            f"disk    {_size(self.index_bytes)} for the index, and {_size(self.folder_bytes)} until it is built\n"
            "nothing was written"
        )


def estimate(job: BuildJob) -> Estimate:
    """Embed a few batches, multiply some matrices, and calculate; writes nothing.

    Raises:
        ValueError: as of `IndexBuild.check`.
    """
    job.check()
    speed, flops = _documents_per_s(job), _flops(job.manifest.dim)
    count, dim, size = job.manifest.count, job.manifest.dim, job.size
    ranks = max(1, min(job.ranks.count, job.shards.num_shards))
    share = -(-job.shards.num_shards // ranks) / max(1, job.shards.num_shards)  # of the rank with most shards
    ids = job.store.ids
    spread = ids[:: max(1, len(ids) // 1000)]
    id_bytes = int(8 * count + count * sum(len(name.encode()) for name in spread) / max(1, len(spread)))
    assign = 2 * count * size.num_lists * dim * (0.05 if "_HNSW" in job.factory else 1.0)
    exact = 2 * count * dim * job.config.recall_queries
    shard = min(count, job.config.shard_size)
    whole = 0 if size.num_lists or job.factory == "Flat" else size.file_bytes
    return Estimate(
        documents_per_s=speed,
        embed_s=count * share / speed,
        train_s=2 * size.train * size.num_lists * dim * ITERATIONS / flops,
        fill_s=(assign + exact) * share / flops,
        memory_bytes=max(shard * dim * 8, size.train * dim * 8 + 8 * dim * size.num_lists, whole) + 8 * count,
        folder_bytes=2 * count * dim + bool(size.num_lists) * size.file_bytes,
        index_bytes=size.file_bytes + id_bytes,
    )


@torch.no_grad()
def _documents_per_s(job: BuildJob) -> float:
    step, ids = job.config.batch_size, job.store.ids
    done, seconds = 0, 0.0
    for start in range(0, min(len(ids), BATCHES * step), step):
        begin = time.perf_counter()
        names = ids[start : start + step]
        job.encoder(stored_features(job.encoder, job.store, names, image_size=job.image_size))
        if start or len(ids) <= step:  # the first batch opens files and warms up
            done, seconds = done + len(names), seconds + time.perf_counter() - begin
    return done / max(seconds, 1e-9) if done else 1.0


def _flops(dim: int) -> float:
    left, right = numpy.ones((1024, dim), numpy.float32), numpy.ones((dim, 1024), numpy.float32)
    left @ right
    begin = time.perf_counter()
    for _ in range(4):
        left @ right
    return 4 * 2 * 1024 * 1024 * dim / (time.perf_counter() - begin)


def _duration(seconds: float) -> str:
    for limit, unit, divisor in ((120.0, "s", 1), (7200.0, "min", 60)):
        if seconds < limit:
            return f"{seconds / divisor:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"


def _size(num_bytes: int) -> str:
    for limit, unit, divisor in ((1 << 20, "KiB", 1 << 10), (1 << 30, "MiB", 1 << 20)):
        if num_bytes < limit:
            return f"{num_bytes / divisor:.3g} {unit}"
    return f"{num_bytes / (1 << 30):.3g} GiB"
