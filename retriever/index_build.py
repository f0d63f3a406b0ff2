"""Building an index of any size in stages that survive a kill.

1. *Embed*: each rank embeds its shards of documents; a finished shard is sealed (`retriever.embedding_shards`).
2. *Train*: the first rank trains lists and codes on a sample.
3. *Fill*: each rank encodes its shards into lists (`retriever.list_files`), and finds the exact best of its vectors for
   the queries that recall is measured with.
4. *Publish*: the first rank merges the lists on the disk, measures recall, searching harder until ``index.recall`` is
   reached, and publishes.

All that is made before the end lies in ``.build-KEY`` in the index folder, where KEY is of what decides the result: a
job that is started again finds what is finished and does only the rest; a job of other weights, documents or options
starts anew and removes it. What is made does not depend on the number of ranks, down to the bytes. A process holds one
shard of vectors, or the sample, or one list, and 8 bytes a document for the ids; only graphs (HNSW), which the
automatic choice takes for small memories alone, are made in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray
from rich.console import Console

from data.progress import progress
from retriever import versions
from retriever.config import IndexConfig
from retriever.durable_files import is_sealed, seal, sha256, sync, unseal
from retriever.embedding_shards import EmbeddingShards
from retriever.faiss_import import faiss
from retriever.id_file import write_ids
from retriever.list_files import is_part, merge_parts, write_part
from retriever.manifest import Manifest
from retriever.ranks import Ranks
from retriever.recall import DEPTH, Exact, complaint, merge_exact, search_hard_enough
from retriever.sizing import kind_of, misfit, size_of
from retriever.vector_files import FLAT, FLAT_HEADER, inverted_lists, read_vectors


class IndexBuild(ABC):
    """One build; every rank makes one and calls `run`. What the vectors are of, a subclass knows.

    Attributes:
        manifest: what the index will say of itself, as far as that is known.
        factory: its faiss factory string.
        shards: its embeddings.
    """

    def __init__(
        self,
        manifest: Manifest,
        ids: Sequence[str],
        config: IndexConfig,
        *,
        ranks: Ranks | None = None,
        console: Console | None = None,
    ) -> None:
        self.manifest, self.config, self._ids = manifest, config, ids
        self.ranks, self.console = ranks or Ranks.here(), console or Console(stderr=True)
        self.directory = Path(config.dir)
        count, dim = manifest.count, manifest.dim
        self.factory = kind_of(config.factory, count, dim)
        self.size = size_of(self.factory, count, dim)
        decides = [repr(manifest), self.factory, config.shard_size, config.batch_size]
        self.folder = self.directory / f".build-{hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]}"
        self.shards = EmbeddingShards(self.folder, count=count, dim=dim, shard_size=config.shard_size)

    def check(self) -> None:
        """Refuse what would fail after hours of embedding.

        Raises:
            ValueError: faiss cannot make such an index of so many vectors, or of this width.
        """
        count, dim = self.manifest.count, self.manifest.dim
        if problem := misfit(self.factory, count, dim):
            raise ValueError(
                f"index.factory is {self.factory!r}, which does not fit {count} documents of width {dim}: {problem}"
            )

    @abstractmethod
    def embed_shard(self, shard: int, advance: Callable[[int], None] = lambda _: None) -> None:
        """Embed and seal a shard, telling ``advance`` how many vectors came."""

    @abstractmethod
    def queries(self) -> NDArray[numpy.float32]:
        """What recall is measured with (Q, E)."""

    @abstractmethod
    def embedded(self) -> None:
        """Called on every rank when all shards are there."""

    def run(self) -> int:
        """Build and publish; gives the version's number.

        Raises:
            ValueError: another job builds here, a file has changed meanwhile, or as of `check`.
            OSError: something could not be written.
        """
        self.check()
        with versions.only_writer(self.directory) if self.ranks.rank == 0 else contextlib.nullcontext():
            if self.ranks.rank == 0:
                self._tidy()
            self.ranks.wait()
            self._embed()
            self.ranks.wait()
            self.embedded()
            if self.ranks.rank == 0:
                self._train()
            self.ranks.wait()
            exact = self._fill()
            version = self._publish(exact) if self.ranks.rank == 0 else -1
            number: int = self.ranks.gather(version)[0]
        return number

    def _mine(self) -> range:
        return range(self.ranks.rank, self.shards.num_shards, self.ranks.count)

    def _tidy(self) -> None:
        """Make the folder; remove what other jobs left that can no longer be of use."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for other in self.directory.glob(".build-*"):
            if other != self.folder:
                self._say(f"{other} is of another build that did not end, and is removed")
                shutil.rmtree(other)
        for left in (*self.directory.glob("versions/.*.tmp"), *self.folder.glob(".*.tmp")):
            shutil.rmtree(left) if left.is_dir() else left.unlink()

    def _embed(self) -> None:
        mine = [shard for shard in self._mine() if not self.shards.is_done(shard)]
        there = self.shards.num_shards - sum(self.ranks.gather(len(mine)))
        if there:
            self._say(f"going on: {there} of {self.shards.num_shards} shards of embeddings are there")
        with self._bar("embedding", sum(len(self.shards.rows(shard)) for shard in mine), "documents") as advance:
            for shard in mine:
                self.embed_shard(shard, advance)

    @property
    def _trained_path(self) -> Path:
        return self.folder / "trained.faiss"

    def _train(self) -> None:
        """Train lists and codes on a sample, once."""
        if not self.size.num_lists or is_sealed(self._trained_path):
            return
        for part in self.folder.glob("part-*"):  # of an index that is damaged now
            part.unlink()
        self._say(f"training {self.factory} on {self.size.train} of {self.manifest.count} vectors")
        vectors = faiss.index_factory(self.manifest.dim, self.factory, faiss.METRIC_INNER_PRODUCT)
        vectors.train(self.shards.sample(self.size.train))
        temporary = self.folder / ".trained.faiss.tmp"
        text = faiss.serialize_index(vectors).tobytes()
        temporary.write_bytes(text)
        sync(temporary)
        temporary.replace(self._trained_path)
        sync(self.folder)
        seal(self._trained_path, hashlib.sha256(text).hexdigest())

    def _trained(self) -> Any:
        """What `_train` made; ValueError if it is no longer that."""
        if not is_sealed(self._trained_path):
            raise unseal(self._trained_path)
        return faiss.read_index(str(self._trained_path))

    def _part(self, shard: int) -> Path:
        return self.folder / f"part-{shard:06d}.lists"

    def _fill(self) -> Exact | None:
        """Lists of this rank's shards, and the exact best for the queries (on the first rank, over all shards)."""
        query, found = self.queries(), []
        trained = self._trained() if self.size.num_lists else None
        with self._bar("filling", len(self._mine()), "shards") as advance:
            for shard in self._mine():
                vectors = self.shards.read(shard)
                found.append(Exact.of(query, vectors, first=self.shards.rows(shard).start))
                if trained is not None:
                    self.fill_part(trained, shard, vectors)
                advance(1)
        every = [exact for part in self.ranks.gather(found) for exact in part]
        return merge_exact(query, every) if self.ranks.rank == 0 else None

    def fill_part(self, trained: Any, shard: int, vectors: NDArray[numpy.float32]) -> None:
        """The lists of one shard, unless they are there as they were written."""
        ivf = inverted_lists(trained)
        if not is_part(self._part(shard), num_lists=ivf.nlist, code_size=ivf.code_size, count=len(vectors)):
            write_part(self._part(shard), trained, vectors, first=self.shards.rows(shard).start)

    def _publish(self, exact: Exact | None) -> int:
        assert exact is not None
        manifest = self.manifest

        def write(folder: Path) -> None:
            nonlocal manifest
            path = folder / "index.faiss"
            self.assemble(path)
            write_ids(folder / "ids", self._ids)
            manifest = replace(
                manifest, factory=self.factory, sha256=sha256(path), ids_sha256=sha256(folder / "ids"),
                recall_at_10=1.0 if self.factory == "Flat" else -1.0,
            )  # fmt: skip
            if self.factory != "Flat" and manifest.count >= DEPTH:
                vectors = read_vectors(
                    path, checksum=manifest.sha256, dim=manifest.dim, count=manifest.count, flat=False, mapped=True
                )
                effort, recall = search_hard_enough(vectors, exact, target=self.config.recall)
                manifest = replace(
                    manifest,
                    effort=effort,
                    recall_at_10=recall,
                    recall_queries=len(exact.query) - len(exact.query) // 2,
                )
            manifest.write(folder / "manifest.json")

        version = versions.publish(self.directory, write)
        versions.prune(
            self.directory, keep=self.config.keep_versions, named=versions.named_by_checkpoints(self.directory)
        )
        shutil.rmtree(self.folder)
        recall = f", recall@{DEPTH} {manifest.recall_at_10:.3f}" if manifest.recall_at_10 >= 0 else ""
        self._say(
            f"index {self.directory}: version {version}, {manifest.count} documents, {self.factory}{recall}, "
            f"{self.manifest.store[:12]}+{self.manifest.num_edits}"
        )
        if said := complaint(manifest, self.config.recall):
            self._say(said)
        return version

    def assemble(self, path: Path) -> None:
        """Write ``index.faiss``."""
        if self.size.num_lists:
            merge_parts(path, self._trained(), [self._part(shard) for shard in range(self.shards.num_shards)])
            return
        if self.factory == "Flat":
            count, dim = self.manifest.count, self.manifest.dim
            with path.open("wb") as file:
                file.write(FLAT_HEADER.pack(FLAT, dim, count, 1 << 20, 1 << 20, True, 0, count * dim))
                for shard in range(self.shards.num_shards):
                    file.write(self.shards.read(shard).astype("<f4").tobytes())
            return
        vectors = faiss.index_factory(self.manifest.dim, self.factory, faiss.METRIC_INNER_PRODUCT)
        if not vectors.is_trained:
            vectors.train(self.shards.sample(self.config.shard_size))
        for shard in range(self.shards.num_shards):
            vectors.add(self.shards.read(shard))
        faiss.write_index(vectors, str(path))

    def _say(self, text: str) -> None:
        if self.ranks.rank == 0:
            self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    @contextlib.contextmanager
    def _bar(self, what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """Progress of this rank's share, which is about everybody's."""
        if self.ranks.rank or not total:
            yield lambda _: None
            return
        share = f" (1 of {self.ranks.count} ranks)" if self.ranks.count > 1 else ""
        with progress(self.console, what + share, total, unit) as advance:
            yield advance
