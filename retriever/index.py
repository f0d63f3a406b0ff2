"""One version of the index: which documents score highest for a query, and what it is after documents changed.

An index folder holds ``versions/<n>/{index.faiss, ids, manifest.json}`` and ``CURRENT`` (`retriever.versions`). The
manifest says what made the vectors and how many there are; what does not match is refused with both sides named, and a
file whose checksum is off is refused before faiss parses it (`retriever.vector_files`).

Index scores only choose candidates. Ties break by document id, so equal vectors give one order everywhere.

**Documents come and go without a rebuild.** A flat index is copied with the new vectors in place: that is as cheap
as writing it. Others keep ``index.faiss`` as it is (faiss's HNSW can remove nothing): new vectors go
to a small flat index beside it (``added.faiss``), the rows of what is gone are listed (``dead``) and never found.
Every search pays for both, so beyond a share of the whole `Index.compacted` puts them into one file again, without
embedding anything.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from retriever import versions
from retriever.device import copied_to_gpu, why_not_on_gpu
from retriever.durable_files import sha256
from retriever.faiss_import import faiss
from retriever.id_file import IdFile, Shifted, write_ids
from retriever.manifest import ANEW, Manifest, read_manifest
from retriever.search import Rows, Scores, Vectors, best_rows, check_k, merged
from retriever.upkeep import without_rows
from retriever.vector_files import FLAT_HEADER, check_file, read_vectors
from retriever.versions import list_versions, prune

__all__ = ["FLAT_HEADER", "Index", "Manifest", "list_versions", "load", "prune"]


class Index:
    """One version, loaded: inner-product search over all documents."""

    def __init__(
        self,
        vectors: Any,
        ids: Sequence[str],
        manifest: Manifest,
        *,
        added: Any = None,
        dead: Rows | None = None,
        folder: Path | None = None,
    ) -> None:
        """An index of parts that fit each other.

        Args:
            vectors: a faiss index whose ids are rows.
            ids: of all rows, those of ``added`` behind the others.
            added: flat, the vectors that came later.
            dead: rows that are not to be found, ascending.
            folder: of the version that this was read from.
        """
        self.manifest, self.folder = manifest, folder
        self._ids: Sequence[str] = list(ids) if isinstance(ids, list | tuple) else ids
        self._dead = numpy.zeros(0, numpy.int64) if dead is None else dead
        self._added = added
        num_added = 0 if added is None else added.ntotal
        found = (vectors.ntotal + num_added, num_added, len(self._dead))
        if not len(self._ids) == found[0] or found != (manifest.num_rows, manifest.num_added, manifest.num_dead):
            raise ValueError(
                f"index and documents are out of step: {found[0]} vectors, {len(self._ids)} ids, "
                f"{manifest.num_rows} in the manifest"
            )
        split = int(numpy.searchsorted(self._dead, vectors.ntotal))
        self._vectors = vectors
        self._parts = [Vectors(vectors, effort=manifest.effort, dead=self._dead[:split])]
        if num_added:
            self._parts.append(Vectors(added, dead=self._dead[split:] - vectors.ntotal))
        self._row_of: dict[str, int] | None = None
        self._id_array: NDArray[numpy.object_] | None = None

    @classmethod
    def from_embeddings(cls, embedding_UE: Tensor, ids: Sequence[str], manifest: Manifest) -> Index:
        """A flat index of embeddings (U, E), one for each id."""
        vectors = faiss.IndexFlatIP(embedding_UE.shape[1])
        vectors.add(embedding_UE.detach().float().contiguous().numpy())
        return cls(vectors, ids, manifest)

    @classmethod
    def from_batches(cls, batches: Iterable[Tensor], ids: Sequence[str], manifest: Manifest) -> Index:
        """The same of embeddings (B, E) that come one batch after the other, in the order of the ids, held once."""
        vectors = faiss.IndexFlatIP(manifest.dim)
        for batch_BE in batches:
            vectors.add(batch_BE.detach().float().contiguous().numpy())
        return cls(vectors, ids, manifest)

    def __len__(self) -> int:
        """Documents that can be found."""
        return len(self._ids) - len(self._dead)

    @property
    def ids(self) -> Sequence[str]:
        """The documents that can be found."""
        if not len(self._dead):
            return self._ids
        dead = set(self._dead.tolist())
        return [name for row, name in enumerate(self._ids) if row not in dead]

    @property
    def vectors(self) -> Any:
        """The faiss index, without what was added later."""
        return self._vectors

    def placed(self, device: str, *, say: Callable[[str], None]) -> Index:
        """This index, searched on the CPU, on a GPU, or (auto) on a GPU where that is possible.

        Args:
            say: told why not, where there is a GPU that cannot be used.

        Raises:
            ValueError: a GPU is demanded and cannot be used.
        """
        if device == "cpu":
            return self
        dead = self._dead[self._dead < len(self._parts[0])]
        problem = why_not_on_gpu(self._vectors, num_dead=len(dead))
        if problem and device == "gpu":
            raise ValueError(f"index.device is 'gpu', but {problem}; use auto or cpu")
        if problem:
            if torch.cuda.is_available():
                say(f"the index is searched on the CPU: {problem}")
            return self
        vectors, self._gpu = copied_to_gpu(self._vectors)
        self._parts[0] = Vectors(vectors, effort=self.manifest.effort, on_gpu=True)
        return self

    def search(
        self, query_BE: Tensor, *, k: int, forbidden: Sequence[Collection[str]] | None = None
    ) -> tuple[list[list[str]], Tensor]:
        """Ids of the k best documents of each query, best first, and their scores (B, k).

        Args:
            forbidden: for each query, documents that it must not find (its own, say); ids that are not there are fine.

        Raises:
            ValueError: if k exceeds the number of documents that are not forbidden.
        """
        check_k(k, len(self))
        score, row = self.best(query_BE, k=k, forbidden=forbidden)
        if row.size and row[:, -1].min() < 0:
            few = int((row >= 0).sum(axis=1).min())
            raise ValueError(
                f"k is {k}, but a query is left with {few} documents that it may find; take a smaller k or forbid fewer"
            )
        return self._names(row), torch.from_numpy(score)

    def _names(self, row_BK: Rows) -> list[list[str]]:
        """Their ids. Taken together: one by one, each waits for memory by itself."""
        if isinstance(self._ids, list):
            if self._id_array is None:
                self._id_array = numpy.array(self._ids, dtype=object)
            names: list[list[str]] = self._id_array[row_BK].tolist()
            return names
        return [[self._ids[row] for row in one] for one in row_BK.tolist()]

    def best(
        self, query_BE: Tensor, *, k: int, forbidden: Sequence[Collection[str]] | None = None
    ) -> tuple[Scores, Rows]:
        """Scores and rows (B, k) of what `search` finds; -inf and -1 behind the last, where there are fewer."""
        query = numpy.ascontiguousarray(query_BE.detach().float().numpy())
        barred = None if forbidden is None else [self._rows_of(names) for names in forbidden]
        score, row = best_rows(self._parts[0], query, k=k, ids=self._ids, forbidden=barred)
        if len(self._parts) == 1:
            return score, row
        base = len(self._parts[0])
        later = None if barred is None else [rows[rows >= base] - base for rows in barred]
        more = best_rows(self._parts[1], query, k=k, ids=Shifted(self._ids, base), forbidden=later)
        return merged(
            numpy.concatenate([score, more[0]], axis=1),
            numpy.concatenate([row, numpy.where(more[1] < 0, -1, more[1] + base)], axis=1),
            k=k, ids=self._ids,
        )  # fmt: skip

    def id(self, row: int) -> str:
        return self._ids[row]

    def _rows_of(self, names: Collection[str]) -> Rows:
        """The rows of ids, the dead ones of the same id not among them."""
        if isinstance(self._ids, IdFile):
            rows = self._ids.find(list(names))
            return rows[rows >= 0]
        if self._row_of is None:
            self._row_of = {name: row for row, name in enumerate(self._ids)}
        return numpy.array([self._row_of[name] for name in names if name in self._row_of], dtype=numpy.int64)

    def replaced(
        self, ids: Sequence[str], embedding: Tensor | Iterable[Tensor], *, num_edits: int, gone: Collection[str] = ()
    ) -> Index:
        """A copy in which ``ids`` have new vectors, those it did not hold yet at the end, and ``gone`` are left out.

        Args:
            embedding: one vector for each of ``ids``, in one tensor (U, E) or in batches (B, E) of their order.
        """
        gone = set(gone)
        batches = [embedding] if isinstance(embedding, Tensor) else embedding
        if not self._parts[0].is_flat:
            return self._with_additions(ids, batches, num_edits=num_edits, gone=gone)
        rows = [row for row, name in enumerate(self._ids) if name not in gone]
        kept = [self._ids[row] for row in rows]
        place = {name: i for i, name in enumerate(kept)}
        new = [name for name in ids if name not in place]
        place |= {name: len(kept) + i for i, name in enumerate(new)}
        matrix = numpy.empty((len(place), self.manifest.dim), dtype=numpy.float32)
        matrix[: len(kept)] = self.vectors.reconstruct_n(0, len(self._ids))[rows]
        left = iter(ids)
        for batch_BE in batches:
            for vector in batch_BE.detach().float().numpy():
                matrix[place[next(left)]] = vector
        manifest = replace(self.manifest, num_edits=num_edits, count=len(place))
        return Index.from_embeddings(torch.from_numpy(matrix), [*kept, *new], manifest)

    def _with_additions(
        self, ids: Sequence[str], batches: Iterable[Tensor], *, num_edits: int, gone: Collection[str]
    ) -> Index:
        """The same where the vectors cannot be rewritten: old rows are dead, new vectors stand at the end."""
        newly_dead = self._rows_of([*ids, *gone])
        dead = numpy.union1d(self._dead, newly_dead)
        added = faiss.IndexFlatIP(self.manifest.dim)
        if self._added is not None:
            added.add(self._added.reconstruct_n(0, self._added.ntotal))
        for batch_BE in batches:
            added.add(batch_BE.detach().float().contiguous().numpy())
        rows = [*self._ids, *ids]
        manifest = replace(
            self.manifest, num_edits=num_edits, count=len(rows) - len(dead), num_added=added.ntotal, num_dead=len(dead)
        )
        return Index(self.vectors, rows, manifest, added=added, dead=dead, folder=self.folder)

    def without_additions(self) -> Index:
        """The same without what is in ``added.faiss``: the part of a rank that leaves it to another."""
        base = len(self._parts[0])
        dead = self._dead[: numpy.searchsorted(self._dead, base)]
        manifest = replace(self.manifest, count=base - len(dead), num_added=0, num_dead=len(dead))
        ids = self._ids if base == len(self._ids) else self._ids[:base]
        return Index(self.vectors, ids, manifest, dead=dead)

    @property
    def overhead(self) -> float:
        """Share of the rows that are dead or were added later: what `compacted` would clear away."""
        return self.manifest.overhead

    def compacted(self) -> Index:
        """The same documents in one faiss index: lists are filled anew, a graph is built anew, nothing is embedded."""
        if not len(self._dead) and self._added is None:
            return self
        alive = numpy.setdiff1d(numpy.arange(len(self._ids)), self._dead)
        base = len(self._parts[0])
        old, later = alive[alive < base], alive[alive >= base] - base
        fresh = numpy.zeros((0, self.manifest.dim), numpy.float32)
        if self._added is not None:
            fresh = self._added.reconstruct_n(0, self._added.ntotal)[later]
        vectors = without_rows(self.vectors, old, fresh)
        manifest = replace(
            self.manifest, num_added=0, num_dead=0, sha256="", added_sha256="", dead_sha256="", recall_at_10=-1.0,
            recall_queries=0,
        )  # fmt: skip
        return Index(vectors, [self._ids[row] for row in alive.tolist()], manifest)

    def publish(self, directory: str | Path, *, version: int | None = None) -> int:
        """Write this index as a version of ``directory`` and make it current; gives the version's number.

        Raises:
            OSError: if it could not be written; what was current before still is.
        """
        manifest = self.manifest

        def write(folder: Path) -> None:
            nonlocal manifest
            if self.folder is None:
                faiss.write_index(self.vectors, str(folder / "index.faiss"))
            else:
                _link(self.folder / "index.faiss", folder / "index.faiss")
            write_ids(folder / "ids", self._ids)
            if self._added is not None:
                faiss.write_index(self._added, str(folder / "added.faiss"))
            if len(self._dead):
                (folder / "dead").write_bytes(self._dead.astype("<i8").tobytes())
            hashes = {
                field: sha256(folder / name) if (folder / name).exists() else ""
                for field, name in (
                    ("sha256", "index.faiss"), ("ids_sha256", "ids"), ("added_sha256", "added.faiss"),
                    ("dead_sha256", "dead"),
                )
            }  # fmt: skip
            manifest = replace(manifest, **hashes)  # type: ignore[arg-type]
            manifest.write(folder / "manifest.json")

        number = versions.publish(directory, write, version=version)
        self.manifest = manifest
        return number


def load(directory: str | Path, *, version: int | None = None, mapped: bool = False) -> Index:
    """Load a version (default: the current one).

    Args:
        mapped: leave the lists of an IVF index on the disk, for memories larger than RAM.

    Raises:
        FileNotFoundError: if there is none; says which command makes one.
        ValueError: if a file is damaged, or is not what this program writes; names it.
    """
    directory = Path(directory)
    if version is None:
        version = versions.current(directory)
    folder = directory / "versions" / str(version)
    try:
        manifest = read_manifest(folder / "manifest.json")
        check_file(folder / "ids", manifest.ids_sha256)
        ids = IdFile(folder / "ids")
        if len(ids) != manifest.num_rows:
            raise ValueError(f"{folder / 'ids'} is damaged: {len(ids)} ids for {manifest.num_rows} vectors; {ANEW}")
        dead = _read_dead(folder / "dead", manifest) if manifest.num_dead else None
        dim = manifest.dim
        added = None
        if manifest.num_added:
            path = folder / "added.faiss"
            added = read_vectors(path, checksum=manifest.added_sha256, dim=dim, count=manifest.num_added, flat=True)
        vectors = read_vectors(
            folder / "index.faiss", checksum=manifest.sha256, dim=dim, count=manifest.num_base,
            flat=manifest.factory == "Flat", mapped=mapped,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise FileNotFoundError(f"index version {version} of {directory} is incomplete: {error.filename}") from None
    return Index(vectors, ids, manifest, added=added, dead=dead, folder=folder)


def check_files(directory: str | Path, version: int, manifest: Manifest) -> None:
    """Refuse a version of which a file is damaged or missing, without loading it.

    Raises:
        FileNotFoundError, ValueError: as `load`.
    """
    folder = Path(directory) / "versions" / str(version)
    for name, right in (
        ("ids", manifest.ids_sha256), ("index.faiss", manifest.sha256), ("added.faiss", manifest.added_sha256),
        ("dead", manifest.dead_sha256),
    ):  # fmt: skip
        if right or name in ("ids", "index.faiss"):
            check_file(folder / name, right)


def _read_dead(path: Path, manifest: Manifest) -> Rows:
    check_file(path, manifest.dead_sha256, size=8 * manifest.num_dead)
    dead = numpy.fromfile(path, dtype="<i8").astype(numpy.int64)
    if (numpy.diff(dead) <= 0).any() or dead[0] < 0 or dead[-1] >= manifest.num_rows:
        raise ValueError(f"{path} is damaged: it names rows that are not there; {ANEW}")
    return dead


def _link(source: Path, target: Path) -> None:
    """The same file under another name (versions are never changed), or a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
