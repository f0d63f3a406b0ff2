"""Inverted lists made shard by shard and merged on the disk, so that no process ever holds an index.

faiss merges indices in memory, or into a file that names another file by its path. Here each shard's vectors are
encoded by the trained, empty index and written list by list; the merge copies list after list from all parts behind
that index's own header, which gives the very file that faiss writes for an index in memory (a test compares them).
What is in memory is one shard, then one list.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from retriever.durable_files import sync
from retriever.faiss_import import faiss
from retriever.vector_files import inverted_lists

# faiss/impl/index_write.cpp: "ilar", number of lists, bytes of a code, then the sizes of the lists, in one of two ways.
LISTS = struct.Struct("<4sqq4sq")
TAIL = LISTS.size  # of an index whose lists are all empty: "sprs" and no sizes
MARK = b"rag_lst1"


def write_part(path: Path, trained: Any, vectors: NDArray[numpy.float32], *, first: int) -> None:
    """The lists of some vectors, whose rows begin at ``first``; ``trained`` is left as empty as it was."""
    ivf = inverted_lists(trained)
    trained.add_with_ids(vectors, numpy.arange(first, first + len(vectors)))
    lists = faiss.downcast_InvertedLists(ivf.invlists)
    sizes = numpy.array([lists.list_size(i) for i in range(ivf.nlist)], dtype="<i8")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(MARK)
        file.write(sizes.tobytes())
        for i in numpy.nonzero(sizes)[0].tolist():
            file.write(faiss.rev_swig_ptr(lists.get_codes(i), int(sizes[i]) * lists.code_size).tobytes())
            file.write(faiss.rev_swig_ptr(lists.get_ids(i), int(sizes[i])).astype("<i8").tobytes())
        file.flush()
        os.fsync(file.fileno())
    trained.reset()
    temporary.replace(path)
    sync(path.parent)


def is_part(path: Path, *, num_lists: int, code_size: int, count: int) -> bool:
    """Whether a part is there with the size that it must have."""
    try:
        return path.stat().st_size == len(MARK) + 8 * num_lists + count * (code_size + 8)
    except FileNotFoundError:
        return False


def merge_parts(path: Path, trained: Any, parts: Sequence[Path]) -> int:
    """Write the index that holds all parts' vectors, in a list in the order of the parts; gives their number.

    Raises:
        ValueError: a part is damaged.
    """
    ivf = inverted_lists(trained)
    num_lists, code_size = ivf.nlist, ivf.code_size
    files = [part.open("rb") for part in parts]
    try:
        sizes = numpy.stack([_sizes(file, num_lists, code_size) for file in files])
        totals = sizes.sum(axis=0)
        inner, whole = ivf.ntotal, trained.ntotal
        ivf.ntotal = trained.ntotal = int(totals.sum())
        head = faiss.serialize_index(trained).tobytes()
        ivf.ntotal, trained.ntotal = inner, whole
        assert LISTS.unpack(head[-TAIL:]) == (b"ilar", num_lists, code_size, b"sprs", 0)
        per_entry = code_size + 8
        starts = len(MARK) + 8 * num_lists + (numpy.cumsum(sizes, axis=1) - sizes) * per_entry
        with path.open("wb") as target:
            target.write(head[:-TAIL])
            target.write(_lists_header(totals, code_size))
            for i in numpy.nonzero(totals)[0].tolist():
                pieces = [os.pread(f.fileno(), int(n) * per_entry, int(at)) for f, n, at in
                          zip(files, sizes[:, i], starts[:, i], strict=True) if n]  # fmt: skip
                target.writelines(piece[: len(piece) // per_entry * code_size] for piece in pieces)
                target.writelines(piece[len(piece) // per_entry * code_size :] for piece in pieces)
        return int(totals.sum())
    finally:
        for file in files:
            file.close()


def _sizes(file: Any, num_lists: int, code_size: int) -> NDArray[numpy.int64]:
    mark = file.read(len(MARK))
    sizes = numpy.frombuffer(file.read(8 * num_lists), "<i8").astype(numpy.int64)
    whole = len(MARK) + 8 * num_lists + int(sizes.sum()) * (code_size + 8)
    if mark != MARK or len(sizes) != num_lists or os.fstat(file.fileno()).st_size != whole:
        raise ValueError(f"{file.name} is damaged; remove it and run the same command again")
    return sizes


def _lists_header(totals: NDArray[numpy.int64], code_size: int) -> bytes:
    """As faiss writes it: all sizes, or where at most half of the lists hold anything, those with their numbers."""
    full = numpy.nonzero(totals)[0]
    if len(full) > len(totals) // 2:
        return LISTS.pack(b"ilar", len(totals), code_size, b"full", len(totals)) + totals.astype("<i8").tobytes()
    pairs = numpy.stack([full, totals[full]], axis=1).astype("<i8")
    return LISTS.pack(b"ilar", len(totals), code_size, b"sprs", 2 * len(full)) + pairs.tobytes()
