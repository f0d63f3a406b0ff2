"""faiss, or one clear sentence. One compute thread, as everywhere here (train.threads changes torch's)."""

from __future__ import annotations

try:
    import faiss
except ImportError as error:
    raise ImportError(
        "faiss is not installed: `pip install faiss-cpu`, or on a machine with a GPU `pip install -e .[gpu]`"
    ) from error

faiss.omp_set_num_threads(1)

__all__ = ["faiss"]
