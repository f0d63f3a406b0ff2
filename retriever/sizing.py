"""Which kind of index for how many vectors, and what it will weigh.

Below a thousand vectors nothing beats comparing with all of them; below ten thousand a graph; up to a million, lists
around about 4 sqrt(N) centroids with the vectors in them as they are; beyond that the vectors are rotated and cut into
codes of a byte for four dimensions, and the lists are found through a graph (the rules of autofaiss). A search of
codes is not exact whatever it visits: where memory allows it, ``index.factory`` can ask for lists of whole vectors
("IVF65536_HNSW32,Flat") or of halves ("...,SQfp16") at any size.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from retriever.faiss_import import faiss

FLAT_BELOW, GRAPH_BELOW, WHOLE_UP_TO = 1_000, 10_000, 1_000_000
PER_LIST = 40  # vectors that a centroid is trained on; faiss warns below 39


def choose_factory(count: int, dim: int) -> str:
    """The faiss factory string for ``count`` vectors of a width."""
    if count < FLAT_BELOW:
        return "Flat"
    if count < GRAPH_BELOW:
        return "HNSW32,Flat"
    if count <= WHOLE_UP_TO:
        return f"IVF{round(4 * math.sqrt(count))},Flat"
    num_lists = 1 << round(math.log2(4 * math.sqrt(count)))
    num_codes = max(m for m in range(1, max(2, dim // 4 + 1)) if dim % m == 0 and m <= 192)
    return f"OPQ{num_codes},IVF{num_lists}_HNSW32,PQ{num_codes}"


def kind_of(factory: str, count: int, dim: int) -> str:
    """The faiss factory string that ``index.factory`` or ``index.train_factory`` means for so many vectors."""
    return choose_factory(count, dim) if factory == "auto" else factory


@dataclass(frozen=True)
class Size:
    """What an index weighs.

    Attributes:
        num_lists: of an IVF index, else 0.
        least: vectors without which faiss cannot train it.
        train: vectors that it is trained on (none for flat ones and graphs).
        file_bytes: of ``index.faiss``, about.
    """

    num_lists: int
    least: int
    train: int
    file_bytes: int


def size_of(factory: str, count: int, dim: int) -> Size:
    """About what an index of this factory string weighs."""
    found = re.search(r"IVF(\d+)", factory)
    num_lists = int(found[1]) if found else 0
    last = factory.rpartition(",")[2]
    codes = re.fullmatch(r"PQ(\d+)(?:x(\d+))?(?:fs)?", last)
    per_vector = 4 * dim
    if codes:
        per_vector = math.ceil(int(codes[1]) * int(codes[2] or 8) / 8)
    elif scalar := re.fullmatch(r"SQ(?:fp)?(\d+).*", last):
        per_vector = math.ceil(dim * int(scalar[1]) / 8)
    links = re.match(r"HNSW(\d+)", factory)
    extra = 8 * (2 * int(links[1]) + 2) // 2 + 16 if links else 8 * bool(num_lists)
    rotated, reduced = re.match(r"OPQ\d+", factory), re.match(r"PCAR?(\d+)", factory)
    per_code = 1 << min(int(codes[2] or 8), 62) if codes else 0
    least = max(num_lists, per_code, 256 * bool(rotated), int(reduced[1]) if reduced else 0)
    train = max(least, 256 * bool(codes)) * PER_LIST
    return Size(num_lists, least, min(count, train), count * (per_vector + extra) + 4 * dim * num_lists)


def misfit(factory: str, count: int, dim: int) -> str:
    """Why faiss cannot make an index of this factory string of so many vectors; empty: it can.

    What faiss itself finds, it finds when it trains, or (a graph without links) by ending the process.
    """
    if re.search(r"(?<!\d)0+(?!\d)", factory) or re.search(r"HNSW0*1(?!\d)", factory):
        return "no number in it may be 0, and HNSW needs 2 links or more"
    least = size_of(factory, count, dim).least
    if least > count:  # first, since faiss reserves memory for the lists
        return f"it is trained on {least} vectors or more (one for each list, and for each entry of a code)"
    try:
        made = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        return str(error).splitlines()[0].rpartition("failed: ")[2]
    chain = made.chain if isinstance(made, faiss.IndexPreTransform) else None
    rotation = faiss.downcast_VectorTransform(chain.at(0)) if chain is not None else None
    if isinstance(rotation, faiss.OPQMatrix) and rotation.d_out % rotation.M:
        return f"OPQ{rotation.M} does not divide the width {rotation.d_out}"
    if isinstance(rotation, faiss.PCAMatrix) and rotation.d_out > dim:
        return f"PCA{rotation.d_out} is wider than the vectors"
    return ""
