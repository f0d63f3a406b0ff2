"""Files of vectors that faiss reads, checked before it does.

faiss allocates what a header claims and follows what a file says, so a file gets to it only if it is a regular file of
the manifest's checksum, of a kind on the list below, and begins with the manifest's width, number and metric. A flat
index must have exactly the size that follows from those. For the other kinds faiss is told that no array is larger than
the file, and what it has read is compared with the manifest once more.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from retriever.durable_files import sha256
from retriever.faiss_import import faiss
from retriever.manifest import ANEW

# faiss/impl/index_write.cpp: kind, width, number, two dummies, trained, metric (0: inner product).
HEADER = struct.Struct("<4siqqq?i")
FLAT_HEADER = struct.Struct("<4siqqq?iQ")  # of a flat one; then the number of floats
FLAT = b"IxFI"
KINDS = {
    FLAT: "IndexFlat", b"IwFl": "IndexIVFFlat", b"IwSq": "IndexIVFScalarQuantizer", b"IwPQ": "IndexIVFPQ",
    b"IHNf": "IndexHNSWFlat", b"IHNs": "IndexHNSWSQ", b"IxPT": "IndexPreTransform",
}  # fmt: skip


def check_file(path: Path, right: str, *, size: int | None = None) -> None:
    """Refuse a file that is not regular, or has another size or checksum.

    Raises:
        FileNotFoundError: there is none.
        ValueError: names it, and what is wrong.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # a pipe or a device would never end
        raise ValueError(f"{path} is not a regular file; {ANEW}")
    if size is not None and status.st_size != size:
        raise ValueError(f"{path} is damaged: it has {status.st_size} bytes, {size} are right; {ANEW}")
    if sha256(path) != right:
        raise ValueError(f"{path} is damaged: its checksum is not the manifest's; {ANEW}")


def read_vectors(path: Path, *, checksum: str, dim: int, count: int, flat: bool, mapped: bool = False) -> Any:
    """The faiss index in a file.

    Args:
        flat: it must be a flat one.
        mapped: leave inverted lists on the disk, mapped into memory.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not what it should be; faiss has not read it then, or what it read is dropped.
    """
    check_file(path, checksum, size=FLAT_HEADER.size + 4 * dim * count if flat else None)
    check_header(path, dim=dim, count=count, flat=flat)
    if flat:
        return faiss.read_index(str(path))
    flags = faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY if mapped else 0
    size = path.stat().st_size
    with _arrays_of_at_most(size):
        try:
            vectors = faiss.read_index(str(path), flags)
        except RuntimeError as error:
            raise ValueError(
                f"{path} is damaged: faiss cannot read it ({str(error).splitlines()[0]}); {ANEW}"
            ) from None
    lists = inverted_lists(vectors)
    if (vectors.d, vectors.ntotal, vectors.metric_type) != (dim, count, faiss.METRIC_INNER_PRODUCT):
        raise ValueError(f"{path} is not an index of {count} vectors of width {dim}; {ANEW}")
    if lists is not None:
        _check_lists(path, lists, count=count, size=size)
    elif not hasattr(vectors, "hnsw"):
        raise ValueError(f"{path} is an {type(vectors).__name__}, which this version does not write; {ANEW}")
    return vectors


def inverted_lists(vectors: Any) -> Any:
    """The ``IndexIVF`` within, whatever transforms stand before it; None if there is none."""
    ivf = faiss.try_extract_index_ivf(vectors)
    return None if ivf is None else faiss.downcast_index(ivf)


def check_header(path: Path, *, dim: int, count: int, flat: bool) -> None:
    """Refuse a kind that is not on the list, and sizes that are not the manifest's."""
    with path.open("rb") as file:
        head = file.read(FLAT_HEADER.size)
    if flat:
        whole = len(head) == FLAT_HEADER.size and FLAT_HEADER.unpack(head)
        if not whole or (whole[0], whole[1], whole[2], whole[6], whole[7]) != (FLAT, dim, count, 0, dim * count):
            raise ValueError(f"{path} is not a flat index of {count} vectors of width {dim}; {ANEW}")
        return
    if len(head) < HEADER.size:
        raise ValueError(f"{path} is damaged: it has {len(head)} bytes; {ANEW}")
    kind, found_dim, found_count, _, _, _, metric = HEADER.unpack(head[: HEADER.size])
    if kind not in KINDS or kind == FLAT:
        raise ValueError(f"{path} is of a kind ({kind!r}) that this version does not read; {ANEW}")
    if (found_dim, found_count, metric) != (dim, count, 0):
        raise ValueError(f"{path} is not an index of {count} vectors of width {dim}; {ANEW}")


def _check_lists(path: Path, ivf: Any, *, count: int, size: int) -> None:
    lists = faiss.downcast_InvertedLists(ivf.invlists)
    if sum(lists.list_size(i) for i in range(ivf.nlist)) != count:
        raise ValueError(f"{path} is damaged: its lists do not hold {count} vectors; {ANEW}")
    if isinstance(lists, faiss.OnDiskInvertedLists):
        per_entry = lists.code_size + 8
        ends = (lists.lists.at(i).offset + lists.lists.at(i).size * per_entry for i in range(ivf.nlist))
        if lists.filename or max(ends) > size:  # a name would lead to another file
            raise ValueError(f"{path} is damaged: its lists lie outside of it; {ANEW}")


@contextmanager
def _arrays_of_at_most(size: int) -> Iterator[None]:
    before = faiss.get_deserialization_vector_byte_limit(), faiss.get_deserialization_loop_limit()
    faiss.set_deserialization_vector_byte_limit(size)
    faiss.set_deserialization_loop_limit(size)
    try:
        yield
    finally:
        faiss.set_deserialization_vector_byte_limit(before[0])
        faiss.set_deserialization_loop_limit(before[1])
