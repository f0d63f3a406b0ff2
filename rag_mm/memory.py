"""The memory during training: the document store and the index version that searches run on.

The index is embedded anew every ``index.refresh_every_n_steps`` steps with the current retriever, each rank
its share of the documents, and published in the run folder under the step's number, so that a resumed run
searches the very version the interrupted one did.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from data.document_store import Document, DocumentStore
from rag_mm.mesh import Mesh
from rag_mm.towers import Towers
from retriever import index as index_files
from retriever.embed import embed_documents, make_manifest
from retriever.index import Index


class Memory:
    """Search and fetch.

    Attributes:
        version: step at which the current index version was embedded, None before the first.
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
    ) -> None:
        self.store, self.directory, self.mesh = store, directory, mesh
        self.image_size, self.batch_size, self.keep = image_size, batch_size, keep
        self.version: int | None = None
        self.staleness: float | None = None
        self._index: Index | None = None

    def refresh(self, towers: Towers, *, step: int, probe_BE: Tensor | None, k: int, named: set[int]) -> None:
        """Embed the whole memory with the towers and search it from now on.

        Args:
            probe_BE: queries on which old and new version are compared.
            named: versions that checkpoints name and that must be kept.
        """
        old, ids = self._index, self.store.ids
        part = embed_documents(
            towers.encoder,
            self.store,
            [ids[i] for i in towers.share(len(ids)).tolist()],
            image_size=self.image_size,
            batch_size=self.batch_size,
            embed=towers.embed_share,
        )
        embedding = towers.join(part, len(ids))
        self.count_damaged()
        manifest = make_manifest(towers.encoder, self.store, image_size=self.image_size, weights=towers.weights_hash())
        self._index = Index.from_embeddings(embedding, ids, manifest)
        self.version = step
        if self.mesh.is_first:
            self._index.publish(self.directory, version=step)
            index_files.prune(self.directory, keep=self.keep, named=named | {step})
        if old is not None and probe_BE is not None:
            before, after = old.search(probe_BE, k=k)[0], self._index.search(probe_BE, k=k)[0]
            changed = sum(len(set(a) - set(b)) for a, b in zip(after, before, strict=True))
            self.staleness = changed / (k * len(before))

    def count_damaged(self) -> None:
        """After the ranks have read the whole memory together: what one found to be damaged counts on all."""
        for found in self.mesh.gather(self.store.bad.found):
            for name, problem in found.items():
                self.store.condemn(name, problem)
        self.store.bad.count_all()

    def load(self, version: int, *, staleness: float | None) -> None:
        """Go on with a version that was published earlier, and what was said of it then."""
        self._index = index_files.load(self.directory, version=version)
        store = self._index.manifest.store
        if store != self.store.fingerprint:
            raise ValueError(f"the index at {self.directory} is of another store ({store[:12]})")
        self.version, self.staleness = version, staleness

    def search(self, query_BE: Tensor, *, k: int) -> tuple[list[list[str]], Tensor]:
        """Ids of the k best documents and the index's scores (B, k); the same on every rank (rank 0's)."""
        assert self._index is not None, "search before the first refresh"
        found = self._index.search(query_BE, k=k) if self.mesh.is_first else None
        return self.mesh.broadcast(found)

    def fetch(self, ids: list[str]) -> list[Document]:
        """Documents by id, without what is damaged of them."""
        return self.store.read(ids)
