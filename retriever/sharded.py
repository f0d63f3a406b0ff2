"""Search over an index whose parts lie on several ranks: for memories that fit into none of them.

Every rank searches its part with the same queries and keeps its k best; what all found is gathered and merged by score,
ties by id, on each rank alike. Of a flat index the result is the whole index's, bit for bit, whatever the parts are:
scores there do not depend on what else is in the index (`retriever.search`). An IVF index is dealt out list by list; a
rank that is left with too few in the lists of a query visits more of its own, so the result may be better than the
whole index's, never worse. A graph (HNSW) cannot be cut: the first rank holds it, the others nothing.

The price of a search is one gather of k ids and scores from each rank; vectors never travel.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from retriever import versions
from retriever.faiss_import import faiss
from retriever.id_file import IdFile
from retriever.index import Index, load
from retriever.manifest import read_manifest
from retriever.search import check_k
from retriever.vector_files import FLAT_HEADER, check_file, check_header, inverted_lists

Found = tuple[list[list[str]], list[list[float]]]


class ShardedIndex:
    """This rank's part of an index, searched together with the others'.

    Attributes:
        part: what this rank holds.
    """

    def __init__(self, part: Index, *, count: int | None = None, group: Any = None) -> None:
        """All ranks of ``group`` (default: all there are) call this together.

        Args:
            count: documents in all parts; without it, the parts' numbers are added up.
        """
        self.part, self._group = part, group
        self._count = sum(self._gather(len(part))) if count is None else count

    def __len__(self) -> int:
        """Documents in all parts."""
        return self._count

    def search(
        self, query_BE: Tensor, *, k: int, forbidden: Sequence[Collection[str]] | None = None
    ) -> tuple[list[list[str]], Tensor]:
        """`Index.search` over all parts; all ranks call it with the same arguments and get the same.

        Raises:
            ValueError: if k exceeds the number of documents that are not forbidden; on every rank.
        """
        check_k(k, len(self))
        score, row = self.part.best(query_BE, k=k, forbidden=forbidden)
        mine: Found = (
            [[self.part.id(r) for r in rows if r >= 0] for rows in row.tolist()],
            [[s for s, r in zip(scores, rows, strict=True) if r >= 0]
             for scores, rows in zip(score.tolist(), row.tolist(), strict=True)],
        )  # fmt: skip
        return merge(self._gather(mine), k=k)

    def _gather(self, value: Any) -> list[Any]:
        if not dist.is_initialized() or dist.get_world_size(self._group) == 1:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values


def merge(parts: Sequence[Found], *, k: int) -> tuple[list[list[str]], Tensor]:
    """The k best of what parts found, best first, ties by id.

    Raises:
        ValueError: if a query is left with fewer.
    """
    ids: list[list[str]] = []
    best = numpy.zeros((len(parts[0][0]), k), dtype=numpy.float32)
    for b in range(len(best)):
        entries = sorted(
            (-score, name) for names, scores in parts for name, score in zip(names[b], scores[b], strict=True)
        )[:k]
        if len(entries) < k:
            raise ValueError(
                f"k is {k}, but a query is left with {len(entries)} documents that it may find; take a smaller k or "
                "forbid fewer"
            )
        ids.append([name for _, name in entries])
        best[b] = [-negative for negative, _ in entries]
    return ids, torch.from_numpy(best)


def load_sharded(
    directory: str | Path, *, rank: int, num_ranks: int, version: int | None = None, group: Any = None
) -> ShardedIndex:
    """A published index with this rank's part of its vectors in memory; all ranks call it together.

    Raises:
        FileNotFoundError, ValueError: as `retriever.index.load`.
    """
    directory = Path(directory)
    number = versions.current(directory) if version is None else version
    part = load_part(directory, rank=rank, num_ranks=num_ranks, version=number)
    count = read_manifest(directory / "versions" / str(number) / "manifest.json").count
    return ShardedIndex(part, count=count, group=group)


def load_part(directory: Path, *, rank: int, num_ranks: int, version: int) -> Index:
    """The part of a version that a rank holds: rows of a flat index, lists of an IVF index."""
    folder = directory / "versions" / str(version)
    try:
        manifest = read_manifest(folder / "manifest.json")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"index version {version} of {directory} is incomplete: {error.filename}") from None
    if manifest.factory == "Flat":
        count, dim, path = manifest.count, manifest.dim, folder / "index.faiss"
        check_file(folder / "ids", manifest.ids_sha256)
        check_file(path, manifest.sha256, size=FLAT_HEADER.size + 4 * dim * count)
        check_header(path, dim=dim, count=count, flat=True)
        first, last = rank * count // num_ranks, (rank + 1) * count // num_ranks
        rows = numpy.memmap(path, "<f4", "r", offset=FLAT_HEADER.size, shape=(count, dim)) if count else ()
        flat = faiss.IndexFlatIP(dim)
        if last > first:
            flat.add(numpy.ascontiguousarray(rows[first:last]))
        return Index(flat, IdFile(folder / "ids")[first:last], replace(manifest, count=last - first))
    whole = load(directory, version=version, mapped=True)
    ivf = inverted_lists(whole.vectors)
    if ivf is None:
        return whole if rank == 0 else _nothing(whole)
    old = faiss.downcast_InvertedLists(ivf.invlists)
    own = faiss.ArrayInvertedLists(ivf.nlist, old.code_size)
    for i in range(rank, ivf.nlist, num_ranks):
        if old.list_size(i):
            own.add_entries(i, old.list_size(i), old.get_ids(i), old.get_codes(i))
    ivf.replace_invlists(own, True)
    own.this.disown()
    return whole if rank == 0 else whole.without_additions()


def _nothing(whole: Index) -> Index:
    manifest = replace(whole.manifest, count=0, num_added=0, num_dead=0)
    return Index(faiss.IndexFlatIP(whole.manifest.dim), [], manifest)
