"""The index of a snapshot of training's weights, made beside the steps: ``python -m retriever.reembed``.

Training starts it (``index.refresh: async``) and takes the version up some steps later. It lives no longer than the
process that started it, which holds the other end of its standard input, and it gives way to the training steps
(niceness, one thread). A version that is there already, of these weights and this store, is left as it is, so that it
may be started again after any end.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from data.command_line import fail, parse
from data.config import DataConfig
from data.dataset import Dataset
from retriever import index as index_files
from retriever.approximate import approximate, question_features
from retriever.build import fresh_encoder
from retriever.config import IndexConfig, RetrieverConfig, encoder_config
from retriever.embed import embed_documents, make_manifest
from retriever.encoder import DualEncoder
from retriever.index import Index
from retriever.recall import complaint
from retriever.shared_disk import twice
from retriever.weights import load_weights

NICENESS = 10


@dataclass(frozen=True)
class ReembedConfig:
    """What the job reads of a run's configuration.

    Attributes:
        data: the data set; ``data.at_edit`` is the edit that the version covers.
        retriever: the dual encoder.
        index: ``index.checkpoint`` is the snapshot, ``index.dir`` the folder of the versions.
        version: number of the version.
    """

    data: DataConfig = field(default_factory=DataConfig)
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    index: IndexConfig = field(default_factory=IndexConfig)
    version: int = 0


def reembed(config: ReembedConfig) -> None:
    """Publish the version, unless it is there.

    Raises:
        FileNotFoundError, ValueError: if snapshot or data are not what they should be.
        OSError: if the version could not be written.
    """
    dataset = Dataset.of(config.data)
    encoder = fresh_encoder(
        encoder_config(config.retriever, config.index), dataset, image_size=config.data.image_size, seed=0,
        image_transform=config.data.image_transform, weights=False,
    )  # fmt: skip
    load_weights(encoder, config.index.checkpoint)
    encoder.eval()
    store, image_size = dataset.store, config.data.image_size
    manifest = make_manifest(encoder, store, image_size=image_size)
    try:
        there = index_files.load(config.index.dir, version=config.version).manifest
        there.check(manifest, where=config.index.dir)
        if there.num_edits == manifest.num_edits:
            return
    except (FileNotFoundError, ValueError):
        pass
    size, ids = config.index.batch_size, store.ids
    batches = (
        embed_documents(encoder, store, ids[start : start + size], image_size=image_size, batch_size=size)
        for start in range(0, len(ids), size)
    )
    index = Index.from_batches(batches, ids, manifest)
    if config.index.train_factory != "Flat":
        index = approximate(
            index, config.index.train_factory, query_QE=_questions(encoder, dataset, config),
            num_queries=config.index.recall_queries, recall=config.index.recall,
        )  # fmt: skip
        if said := complaint(index.manifest, config.index.recall):
            _say(said)
    what = f"index version {config.version}"
    twice(lambda: index.publish(config.index.dir, version=config.version), what=what, say=_say)


@torch.no_grad()
def _questions(encoder: DualEncoder, dataset: Dataset, config: ReembedConfig) -> Tensor | None:
    """Embeddings of the training questions that an index which is not exact is tuned with."""
    features = question_features(
        encoder.featurizer, dataset, count=config.index.recall_queries, image_size=config.data.image_size,
        image_transform=encoder.image_transform, batch_size=config.index.batch_size,
    )  # fmt: skip
    parts = [encoder(part) for part in features]
    return torch.cat(parts) if parts else None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _end_with_the_starter() -> None:
    """End when the other end of standard input is closed, however that came about."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


def main(argv: Sequence[str]) -> int:
    """Entry point; the exit status."""
    threading.Thread(target=_end_with_the_starter, daemon=True).start()
    os.nice(NICENESS)
    config = parse(
        ReembedConfig,
        argv,
        prog="python -m retriever.reembed",
        description="Embed a store with a snapshot of training's weights and publish it as an index version.",
        sections=("data", "retriever", "index"),
    )
    torch.set_num_threads(1)
    try:
        reembed(config)
    except (OSError, ValueError) as error:
        fail(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
