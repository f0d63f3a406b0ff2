"""Embeddings of a store on their way into an index: one file a shard of documents, half precision, sealed.

A shard's file appears by rename, and the ``.json`` that seals it (checksum, documents that were damaged) after it, so
what is there is finished and what a killed job left is done again, never taken for whole. Half precision keeps three
digits of every value, which is far below what separates documents, and halves the disk and the reading.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from data.json_files import read_json
from retriever.durable_files import replace_text, sync

HALF = numpy.dtype("<f2")


class EmbeddingShards:
    """The shards of one build in its folder.

    Attributes:
        num_shards: in all.
    """

    def __init__(self, folder: Path, *, count: int, dim: int, shard_size: int) -> None:
        self.folder, self.count, self.dim, self.shard_size = folder, count, dim, shard_size
        self.num_shards = -(-count // shard_size)

    def rows(self, shard: int) -> range:
        """The rows of a shard's vectors in the index."""
        return range(shard * self.shard_size, min(self.count, (shard + 1) * self.shard_size))

    def is_done(self, shard: int) -> bool:
        """Whether the shard is finished and has its size; its contents are checked when they are read."""
        try:
            return self._path(shard).stat().st_size == self._num_bytes(shard) and bool(self.seal(shard))
        except (FileNotFoundError, ValueError):
            return False

    def seal(self, shard: int) -> Mapping[str, Any]:
        """What was written beside a shard: ``sha256``, ``damaged`` (id to problem) and ``truncated``."""
        seal: Mapping[str, Any] = read_json(self._path(shard).with_suffix(".json"))
        return seal

    def write(
        self, shard: int, embedding: NDArray[numpy.float32], damaged: Mapping[str, str], *, truncated: int = 0
    ) -> None:
        """Finish a shard.

        Args:
            damaged: documents that were, and why.
            truncated: how many texts were cut off.

        Raises:
            ValueError: a value is not finite, or too large for half precision; names the row.
        """
        with numpy.errstate(over="ignore"):
            half = embedding.astype(HALF)
        if not numpy.isfinite(half).all():
            row = self.rows(shard)[int(numpy.nonzero(~numpy.isfinite(half).all(axis=1))[0][0])]
            raise ValueError(f"the embedding of document {row} of the store is not finite in half precision")
        text, path = half.tobytes(), self._path(shard)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with temporary.open("wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
        seal = {"sha256": hashlib.sha256(text).hexdigest(), "damaged": dict(damaged), "truncated": truncated}
        replace_text(path.with_suffix(".json"), json.dumps(seal))

    def read(self, shard: int) -> NDArray[numpy.float32]:
        """The vectors of a shard (rows, E).

        Raises:
            ValueError: they are not what was written; says how to go on.
        """
        path = self._path(shard)
        text = path.read_bytes()
        if len(text) != self._num_bytes(shard) or hashlib.sha256(text).hexdigest() != self.seal(shard)["sha256"]:
            path.with_suffix(".json").unlink(missing_ok=True)
            raise ValueError(
                f"{path} has changed since it was written; run the same command again, which makes it anew"
            )
        return numpy.frombuffer(text, HALF).reshape(-1, self.dim).astype(numpy.float32)

    def sample(self, size: int) -> NDArray[numpy.float32]:
        """Vectors (size, E) spread evenly over all of them, a shard in memory at a time."""
        wanted = numpy.unique(numpy.linspace(0, self.count - 1, num=min(size, self.count)).astype(numpy.int64))
        found = numpy.empty((len(wanted), self.dim), dtype=numpy.float32)
        for shard in range(self.num_shards):
            rows = self.rows(shard)
            first, last = numpy.searchsorted(wanted, [rows.start, rows.stop])
            if last > first:
                found[first:last] = self.read(shard)[wanted[first:last] - rows.start]
        return found

    def _path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:06d}.f16"

    def _num_bytes(self, shard: int) -> int:
        return len(self.rows(shard)) * self.dim * HALF.itemsize
