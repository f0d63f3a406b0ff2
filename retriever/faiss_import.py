"""faiss, or one clear sentence. One compute thread, as everywhere here (train.threads changes torch's)."""

from __future__ import annotations

from typing import Any

try:
    import faiss as module
except ImportError as error:
    raise ImportError(
        "faiss is not installed: `pip install faiss-cpu`, or on a machine with a GPU `pip install -e .[gpu]`"
    ) from error

faiss: Any = module  # what its stubs say of parameters is not what its Python layer takes
faiss.omp_set_num_threads(1)

__all__ = ["faiss"]
