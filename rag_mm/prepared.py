"""What the phases of a training step hand to each other, and what a step says of itself.

Shapes: B questions, F pairs, Q = B + F queries, U unique documents, k documents a question, E embedding width.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from data.dataset import Sample


@dataclass
class Prepared:
    """A global batch after phase 1, the same on every rank.

    Attributes:
        query, document: features of the Q queries and the U unique documents.
        query_embedding (Q, E), document_embedding (U, E): leaves that gather gradients.
        ids: k retrieved ids a question; empty rows in steps without a reader.
        read: (B*k,) rows of the unique documents that are read, replicas' questions one after another.
        positive: (Q, U) which document answers which query.
        contrastive_weight: (Q,), sums to 1 over queries that have a positive.
        reader: the reader's batch of all B questions; empty in steps without a reader.
        drift: mean change of the retrieved documents' scores since the index was made; every few steps
            (`rag_mm.preparation.DRIFT_EVERY`).
        index_version: that was searched, None where nothing was.
        retrieve_s, rerank_s: seconds that embedding queries and search took, and embedding what was found anew.
    """

    step: int
    samples: list[Sample]
    query: dict[str, Tensor]
    document: dict[str, Tensor]
    query_embedding: Tensor
    document_embedding: Tensor
    ids: list[list[str]]
    read: Tensor
    positive: Tensor
    contrastive_weight: Tensor
    reader: dict[str, Tensor] = field(default_factory=dict)
    drift: float | None = None
    index_version: int | None = None
    retrieve_s: float = 0.0
    rerank_s: float = 0.0


@dataclass
class Outcome:
    """What a step computed, summed over the global batch: the same on every rank.

    Attributes:
        losses: by objective, weighted as in the total.
        accuracy: target tokens whose most likely token was right, as a share.
        score_entropy: of the retriever's softmax over the k documents (nats, mean over questions).
        score_margin: between the two best of the k inner products, a mean over questions.
        entropies: for each objective that looks at scores, of its target (``pdist/target``) and of its distribution of
            scores (``pdist/score``), in nats, means over questions.
        contrast: of the contrastive objective's queries with a right document: ``margin`` between the best right and
            the best wrong inner product, and ``accuracy``, the share in which it is above 0.
    """

    losses: dict[str, float]
    accuracy: float | None = None
    score_entropy: float | None = None
    score_margin: float | None = None
    entropies: dict[str, float] = field(default_factory=dict)
    contrast: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        return sum(self.losses.values())


def replica_share(tensors: dict[str, Tensor], num_samples: int, replica: int, num_replicas: int) -> dict[str, Tensor]:
    """A replica's rows of a batch whose tensors have B or B*k rows."""
    share = {}
    for name, tensor in tensors.items():
        size = tensor.shape[0] // num_samples * (num_samples // num_replicas)
        share[name] = tensor[replica * size : (replica + 1) * size]
    return share
