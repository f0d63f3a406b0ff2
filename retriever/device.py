"""Where an index is searched: on a GPU, if faiss was built for one and the kind of index has a search there.

The vectors are copied and stay on the CPU too, where documents come and go and files are written (a GPU index
cannot be written). faiss's limits there, 2,048 rows and lists a query, are kept by `retriever.search`; flat scores come
as the GPU rounds them, so equal ones may be told apart, and parts no longer merge bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch

from retriever.faiss_import import faiss

ON_GPU = ("IndexFlat", "IndexFlatIP", "IndexIVFFlat", "IndexIVFPQ", "IndexIVFScalarQuantizer")


def why_not_on_gpu(vectors: Any, *, num_dead: int = 0) -> str:
    """What keeps an index from a GPU; empty: nothing.

    Args:
        num_dead: rows that it must not find; faiss takes a selector on a GPU and does not look at it.
    """
    if not torch.cuda.is_available():
        return "this machine has no GPU that torch sees"
    if not hasattr(faiss, "StandardGpuResources") or not faiss.get_num_gpus():
        return "faiss was installed without GPU support (see docs/dependencies.md: make faiss-gpu)"
    if type(vectors).__name__ not in ON_GPU:
        return f"an {type(vectors).__name__} is searched on the CPU only"
    if num_dead:
        return (
            f"it has {num_dead} deleted or replaced vectors, which a GPU would find; "
            "`python -m retriever.build ... --index.max_overhead 0` clears them away"
        )
    return ""


def copied_to_gpu(vectors: Any) -> tuple[Any, Any]:
    """The index on the first GPU, and faiss's resources there, which must live as long."""
    resources = faiss.StandardGpuResources()
    return faiss.index_cpu_to_gpu(resources, 0, vectors), resources
