"""Inverted lists made shard by shard and merged on the disk, so that no process ever holds an index.

faiss merges indices in memory, or into a file that names another file by its path. Here each shard's vectors are
encoded by the trained, empty index and written list by list; the merge copies list after list from all parts behind
that index's own header, which gives the very file that faiss writes for an index in memory (a test compares them).
What is in memory is one shard, then one list.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from retriever.durable_files import is_sealed, seal, sync, unseal
from retriever.faiss_import import faiss
from retriever.vector_files import inverted_lists

# faiss/impl/index_write.cpp: "ilar", number of lists, bytes of a code, then the sizes of the lists, in one of two ways.
LISTS = struct.Struct("<4sqq4sq")
TAIL = LISTS.size  # of an index whose lists are all empty: "sprs" and no sizes
MARK = b"rag_lst1"


def write_part(path: Path, trained: Any, vectors: NDArray[numpy.float32], *, first: int) -> None:
    """The lists of some vectors, whose rows begin at ``first``, sealed; ``trained`` is left as empty as it was."""
    ivf = inverted_lists(trained)
    trained.add_with_ids(vectors, numpy.arange(first, first + len(vectors)))
    lists = faiss.downcast_InvertedLists(ivf.invlists)
    sizes = numpy.array([lists.list_size(i) for i in range(ivf.nlist)], dtype="<i8")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    digest = hashlib.sha256()
    with temporary.open("wb") as file:

        def write(text: bytes) -> None:
            digest.update(text)
            file.write(text)

        write(MARK)
        write(sizes.tobytes())
        for i in numpy.nonzero(sizes)[0].tolist():
            write(faiss.rev_swig_ptr(lists.get_codes(i), int(sizes[i]) * lists.code_size).tobytes())
            write(faiss.rev_swig_ptr(lists.get_ids(i), int(sizes[i])).astype("<i8").tobytes())
        file.flush()
        os.fsync(file.fileno())
    trained.reset()
    temporary.replace(path)
    sync(path.parent)
    seal(path, digest.hexdigest())


def is_part(path: Path, *, num_lists: int, code_size: int, count: int) -> bool:
    """Whether a part is there, is what was written, and has the size that it must have."""
    try:
        whole = path.stat().st_size == len(MARK) + 8 * num_lists + count * (code_size + 8)
    except FileNotFoundError:
        return False
    return whole and is_sealed(path)


def merge_parts(path: Path, trained: Any, parts: Sequence[Path]) -> int:
    """Write the index that holds all parts' vectors, in a list in the order of the parts; gives their number.

    Raises:
        ValueError: a part is not what was written; it is made anew when the job is started again.
    """
    ivf = inverted_lists(trained)
    num_lists, code_size = ivf.nlist, ivf.code_size
    files = [part.open("rb") for part in parts]
    try:
        digests = [hashlib.sha256() for _ in files]  # a part is read once, from its beginning to its end
        sizes = numpy.stack([_sizes(file, num_lists, code_size, d) for file, d in zip(files, digests, strict=True)])
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
                pieces = []
                for file, digest, n, at in zip(files, digests, sizes[:, i], starts[:, i], strict=True):
                    if n:
                        pieces.append(os.pread(file.fileno(), int(n) * per_entry, int(at)))
                        digest.update(pieces[-1])
                target.writelines(piece[: len(piece) // per_entry * code_size] for piece in pieces)
                target.writelines(piece[len(piece) // per_entry * code_size :] for piece in pieces)
        for part, digest in zip(parts, digests, strict=True):
            if not is_sealed(part, digest.hexdigest()):
                raise unseal(part)
        return int(totals.sum())
    finally:
        for file in files:
            file.close()


def _sizes(file: Any, num_lists: int, code_size: int, digest: Any) -> NDArray[numpy.int64]:
    head = file.read(len(MARK) + 8 * num_lists)
    digest.update(head)
    mark = head[: len(MARK)]
    sizes = numpy.frombuffer(head[len(MARK) :], "<i8").astype(numpy.int64)
    whole = len(MARK) + 8 * num_lists + int(sizes.sum()) * (code_size + 8)
    if mark != MARK or len(sizes) != num_lists or os.fstat(file.fileno()).st_size != whole:
        raise unseal(Path(file.name))
    return sizes


def _lists_header(totals: NDArray[numpy.int64], code_size: int) -> bytes:
    """As faiss writes it: all sizes, or where at most half of the lists hold anything, those with their numbers."""
    full = numpy.nonzero(totals)[0]
    if len(full) > len(totals) // 2:
        return LISTS.pack(b"ilar", len(totals), code_size, b"full", len(totals)) + totals.astype("<i8").tobytes()
    pairs = numpy.stack([full, totals[full]], axis=1).astype("<i8")
    return LISTS.pack(b"ilar", len(totals), code_size, b"sprs", 2 * len(full)) + pairs.tobytes()
