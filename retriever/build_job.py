"""The build job of a document store: what `retriever.index_build` builds from, made by an encoder."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy
import torch
from numpy.typing import NDArray
from rich.console import Console

from data.bad_data import BadDataError
from data.dataset import Dataset
from retriever.approximate import question_features
from retriever.config import IndexConfig
from retriever.embed import make_manifest, stored_features
from retriever.encoder import DualEncoder, Features
from retriever.index_build import IndexBuild
from retriever.ranks import Ranks


class BuildJob(IndexBuild):
    """The build of a store's index by an encoder.

    Attributes:
        max_bad_share: largest share of the documents that may be damaged; they are said, and embedded as empty ones.
    """

    def __init__(
        self,
        encoder: DualEncoder,
        dataset: Dataset,
        config: IndexConfig,
        *,
        image_size: int,
        max_bad_share: float = 1.0,
        ranks: Ranks | None = None,
        console: Console | None = None,
    ) -> None:
        self.encoder, self.dataset, self.store = encoder, dataset, dataset.store
        self.image_size, self.max_bad_share = image_size, max_bad_share
        manifest = make_manifest(encoder, self.store, image_size=image_size)
        super().__init__(manifest, self.store.ids, config, ranks=ranks, console=console)

    @torch.no_grad()
    def embed_shard(self, shard: int, advance: Callable[[int], None] = lambda _: None) -> None:
        """Embed and seal a shard. Batches end with it, so that no shard depends on where others begin."""
        rows, step = self.shards.rows(shard), self.config.batch_size
        embedding = numpy.empty((len(rows), self.manifest.dim), dtype=numpy.float32)
        damaged, before = dict[str, str](), self.encoder.featurizer.truncated
        starts = range(rows.start, rows.stop, step)
        with ThreadPoolExecutor(1) as reader:  # reads and decodes the next batch while this one is embedded
            coming = reader.submit(self._read, starts[0], rows.stop)
            for start in starts:
                ids, features = coming.result()
                if start + step < rows.stop:
                    coming = reader.submit(self._read, start + step, rows.stop)
                embedding[start - rows.start :][: len(ids)] = self.encoder(features).numpy()
                if found := self.store.bad.found:
                    damaged |= {name: found[name] for name in ids if name in found}
                advance(len(ids))
        truncated = self.encoder.featurizer.truncated - before
        self.shards.write(shard, embedding, damaged, truncated=truncated)

    def _read(self, start: int, stop: int) -> tuple[list[str], Features]:
        ids = self._ids[start : min(start + self.config.batch_size, stop)]
        return list(ids), stored_features(self.encoder, self.store, ids, image_size=self.image_size)

    def embedded(self) -> None:
        """Count what all ranks, and jobs before this one, found to be damaged or too long.

        Raises:
            BadDataError: more than ``max_bad_share`` are; nothing is published.
        """
        truncated = 0
        for shard in range(self.shards.num_shards):
            seal = self.shards.seal(shard)
            truncated += seal.get("truncated", 0)
            for name, problem in seal["damaged"].items():
                self.store.condemn(name, problem)
        if truncated:
            self._say(self.encoder.featurizer.said_truncated(truncated, "documents"))
        self.store.bad.count_all()
        for line in self.store.bad.report():
            self._say(line)
        if complaint := self.store.bad.complaint(self.max_bad_share, whole=True):
            raise BadDataError(complaint)
        self.manifest = replace(self.manifest, num_damaged=self.store.bad.num_bad)

    @torch.no_grad()
    def queries(self) -> NDArray[numpy.float32]:
        """What recall is measured with: questions of training, or documents where there are few questions."""
        wanted = self.config.recall_queries
        parts = [
            self.encoder(features)
            for features in question_features(
                self.encoder.featurizer,
                self.dataset,
                count=wanted,
                image_size=self.image_size,
                image_transform=self.encoder.image_transform,
                batch_size=self.config.batch_size,
            )
        ]
        return torch.cat(parts).float().numpy() if parts else self.shards.sample(wanted)
