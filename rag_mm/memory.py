"""The memory during training: the document store and the index version that searches run on.

A version has the number of the step whose weights embedded it and lies in the run folder, so that a resumed run
searches the very version the interrupted one did. Only the first rank holds it and searches; the others get what it
found. Where it is too large for that (``index.sharded``), each rank holds a part and all search.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from data.document_store import Document, DocumentStore
from rag_mm.mesh import Mesh
from rag_mm.towers import Towers
from retriever import index as index_files
from retriever.approximate import approximate
from retriever.embed import embed_documents, make_manifest
from retriever.index import Index
from retriever.recall import complaint
from retriever.sharded import ShardedIndex, load_sharded
from retriever.shared_disk import patiently, twice


class Memory:
    """Search and fetch.

    Args:
        sharded: each rank holds a part of the index.
        factory: kind of the index (`retriever.sizing.kind_of`).
        recall: what a search of a kind that is not exact must reach.
        recall_queries: with how many vectors that is measured where there are no questions for it.
        wait_s: longest wait for files that another rank wrote, which may be seen late on a disk that machines share.

    Attributes:
        version: step whose weights the current index version was embedded with, None before the first.
        staleness: at the last refresh, the share of the k documents found for the same queries that the new
            version finds differently from the old one (None before there were two).
    """

    def __init__(
        self,
        store: DocumentStore,
        directory: Path,
        mesh: Mesh,
        *,
        image_size: int,
        batch_size: int,
        keep: int,
        sharded: bool = False,
        factory: str = "Flat",
        recall: float = 0.95,
        recall_queries: int = 256,
        wait_s: float = 0.0,
    ) -> None:
        self.sharded, self.wait_s = sharded, wait_s
        self.factory, self.recall, self.recall_queries = factory, recall, recall_queries
        self.store, self.directory, self.mesh = store, directory, mesh
        self.image_size, self.batch_size, self.keep = image_size, batch_size, keep
        self.version: int | None = None
        self.staleness: float | None = None
        self._index: Index | ShardedIndex | None = None

    def refresh(
        self,
        towers: Towers,
        *,
        step: int,
        probe_BE: Tensor | None,
        k: int,
        named: set[int],
        tuning_QE: Tensor | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Embed the whole memory with the towers, each rank its share, and search it from now on (a collective).

        Args:
            probe_BE: queries on which old and new version are compared.
            tuning_QE: queries that recall is measured with, if the index is not exact; without them vectors of its own.
            named: versions that checkpoints name and that must be kept.
            say: told that the version is written once more.
        """
        weights = towers.weights_hash()
        manifest = make_manifest(towers.encoder, self.store, image_size=self.image_size, weights=weights)
        batches, flat = self._embedded(towers), None
        if self.mesh.is_first:
            flat = Index.from_batches(batches, self.store.ids, manifest)
        else:
            for _ in batches:  # each is a collective
                pass
        self.count_damaged()

        def publish() -> Index:
            assert flat is not None
            new = approximate(
                flat, self.factory, query_QE=tuning_QE, num_queries=self.recall_queries, recall=self.recall
            )
            if said := complaint(new.manifest, self.recall):
                say(said)
            twice(lambda: new.publish(self.directory, version=step), what=f"index version {step}", say=say)
            return new

        self._take(step, publish, probe_BE=probe_BE, k=k, named=named)

    def holds(self, towers: Towers) -> bool:
        """Whether the index is exact and of the very vectors that the towers would give now (a collective).

        One that is not exact is also tuned to the questions, which may have moved.
        """
        weights, same = towers.weights_hash(), False
        if self._index is not None:
            held = (self._index.part if isinstance(self._index, ShardedIndex) else self._index).manifest
            needed = make_manifest(towers.encoder, self.store, image_size=self.image_size, weights=weights)
            same = held.is_of(needed) and held.factory == "Flat"
        return self.mesh.broadcast(same)

    def _embedded(self, towers: Towers) -> Iterator[Tensor]:
        """Embeddings of the whole memory in order, some documents (B, E) at a time, on every rank, which share them.

        A rank's documents are every n-th of all, in the batches that they would have if it took all of them at once.
        """
        ids, block = self.store.ids, self.batch_size * self.mesh.size
        for start in range(0, len(ids), block):
            names = ids[start : start + block]
            part = embed_documents(
                towers.encoder, self.store, [names[i] for i in towers.share(len(names)).tolist()],
                image_size=self.image_size, batch_size=self.batch_size, embed=towers.embed_share,
            )  # fmt: skip
            yield towers.join(part, len(names))

    def adopt(self, version: int, *, probe_BE: Tensor | None, k: int, named: set[int]) -> None:
        """Search a version that was published beside the steps, from now on (a collective).

        Raises:
            ValueError: on every rank, if it is not whole, or of another store.
        """
        self._take(version, lambda: self._loaded(version), probe_BE=probe_BE, k=k, named=named)

    def count_damaged(self) -> None:
        """After the ranks have read the whole memory together: what one found to be damaged counts on all."""
        for found in self.mesh.gather(self.store.bad.found):
            for name, problem in found.items():
                self.store.condemn(name, problem)
        self.store.bad.count_all()

    def load(self, version: int, *, staleness: float | None, say: Callable[[str], None] = lambda line: None) -> None:
        """Go on with a version that was published earlier, and what was said of it then (a collective).

        Args:
            say: told that this waits for its files.

        Raises:
            ValueError: on every rank, if it is damaged, or of another store.
            OSError: on every rank, if it cannot be read.
        """
        folder = self.directory / "versions" / str(version)
        whole = self._on_first(
            lambda: patiently(lambda: self._loaded(version), folder=folder, limit_s=self.wait_s, say=say)
        )
        self._index = self._placed(whole, version)
        self.version, self.staleness = version, staleness

    def search(
        self, query_BE: Tensor, *, k: int, forbidden: Sequence[Collection[str]] | None = None
    ) -> tuple[list[list[str]], Tensor]:
        """Ids of the k best documents and the index's scores (B, k); the same on every rank (the first one's).

        Args:
            forbidden: for each query, documents that it must not find.

        Raises:
            ValueError: on every rank, if fewer than k documents are left to a query.
        """
        for names in forbidden or ():
            left = len(self.store) - sum(name in self.store for name in set(names))
            if left < k:
                raise ValueError(
                    f"{k} documents are searched for, but {left} are left to a query that must not find some"
                )
        assert self.version is not None, "search before the first refresh"
        if isinstance(self._index, ShardedIndex):
            versions = self.mesh.gather(self.version)
            assert len(set(versions)) == 1, f"the ranks are at index versions {versions}"
            return self._index.search(query_BE, k=k, forbidden=forbidden)
        found = None
        if self._index is not None:
            found = (*self._index.search(query_BE, k=k, forbidden=forbidden), self.version)
        ids, score, version = self.mesh.broadcast(found)
        assert version == self.version, f"this rank is at index version {self.version}, the first one at {version}"
        return ids, score

    def fetch(self, ids: list[str], *, pictures: Collection[str] | None = None) -> list[Document]:
        """Documents by id, without what is damaged of them; ``pictures`` as of `DocumentStore.read`."""
        return self.store.read(ids, pictures=pictures)

    def _take(
        self, version: int, make: Callable[[], Index], *, probe_BE: Tensor | None, k: int, named: set[int]
    ) -> None:
        """Search what ``make`` gives on the first rank; says how much it differs, and deletes what is not needed."""
        old = self._index
        new = self._placed(self._on_first(make), version)
        changed: float | None = self.staleness
        if self.mesh.is_first:
            index_files.prune(self.directory, keep=self.keep, named=named | {version})
        if new is not None and old is not None and probe_BE is not None:
            before, after = old.search(probe_BE, k=k)[0], new.search(probe_BE, k=k)[0]
            pairs = zip(after, before, strict=True)
            changed = sum(len(set(a) - set(b)) for a, b in pairs) / (k * len(before))
        self.staleness = self.mesh.broadcast(changed)
        self._index, self.version = new, version

    def _placed(self, whole: Index | None, version: int) -> Index | ShardedIndex | None:
        """What this rank searches: the whole index on the first rank, or a part of it on each."""
        if not self.sharded or self.mesh.size == 1:
            return whole
        del whole
        folder = self.directory / "versions" / str(version)
        found: ShardedIndex | Exception
        try:
            found = patiently(
                lambda: load_sharded(
                    self.directory, rank=self.mesh.rank, num_ranks=self.mesh.size, version=version
                ),
                folder=folder, limit_s=self.wait_s,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            found = error
        problems = self.mesh.gather(str(found) if isinstance(found, Exception) else "")
        for rank, problem in enumerate(problems):
            if problem:
                raise OSError(f"rank {rank}: {problem}")
        assert isinstance(found, ShardedIndex)
        return found

    def _on_first(self, make: Callable[[], Index]) -> Index | None:
        """An index on the first rank, None on the others; what is wrong with it is raised on all."""
        index, problem = None, None
        if self.mesh.is_first:
            try:
                index = make()
            except (OSError, ValueError) as error:
                problem = error
        problem = self.mesh.broadcast(problem)
        if problem is not None:
            raise problem
        return index

    def _loaded(self, version: int) -> Index:
        index = index_files.load(self.directory, version=version)
        store = index.manifest.store
        if store != self.store.fingerprint:
            raise ValueError(f"the index at {self.directory} is of another store ({store[:12]})")
        return index
