"""Which documents join a batch for the contrastive objective, and which of those in it are right for which query.

Three kinds join: some of a query's right documents, some that the data names as misleading, and some that are *mined*:
wrong ones that the index, as of its last refresh, finds for the query. Whatever is in the batch then counts as right
for every query that it answers, listed or not: a document with the contents of a right one is no negative of its query.
That costs one read of each right document in a run; digests of what was read are kept (16 bytes each). The ranks share
the reading, dealt out as rows are to the towers.

Everything here is a pure function of (data, seed, step, query, index version), and all ranks call it together: they and
resumed runs agree.

Shapes: Q queries, U unique documents of the batch, E embedding width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from data.document_store import Document
from data.image_formats import Unread
from pipeline import keyed
from rag_mm.config import Config
from rag_mm.memory import Memory
from rag_mm.mesh import Mesh
from rag_mm.towers import Towers


class Contrast:
    """Chooses documents and labels them."""

    def __init__(self, config: Config, memory: Memory, *, towers: Towers, mesh: Mesh) -> None:
        self.config, self.memory, self.towers, self.mesh = config, memory, towers, mesh
        self._right: dict[str, bytes] = {}  # contents of right documents

    def documents(
        self,
        step: int,
        names: Sequence[str],
        gold: Sequence[list[str]],
        hard: Sequence[list[str]],
        query_QE: Tensor,
        *,
        forbidden: Sequence[Collection[str]] | None = None,
        mine: bool = True,
    ) -> set[str]:
        """Ids that join the batch of a step.

        Args:
            names: of the queries, unique in the batch.
            gold, hard: ids of right documents, and of those that the data says are misleading, of each query.
            forbidden: ids of documents that no query may find as a negative of its own.
            query_QE: embeddings, by which the index is searched where negatives are mined.
            mine: False before there is an index.
        """
        o = self.config.objectives
        joining = {name for ids in gold if ids for name in self._some(ids, step, o.contrastive_positives)}
        joining |= {name for ids in hard if ids for name in self._some(ids, step, o.contrastive_hard_negatives)}
        if mine and o.contrastive_mined_negatives:
            joining.update(*self.mined(step, names, gold, query_QE, forbidden))
        return joining

    def _some(self, ids: list[str], step: int, count: int) -> list[str]:
        """Some of several documents, neighbours in their list from a place drawn by (seed, step, ids)."""
        if not count:
            return []
        start = keyed.seed_of("positive", self.config.train.seed, step, *ids)
        return [ids[(start + i) % len(ids)] for i in range(min(count, len(ids)))]

    def mined(
        self,
        step: int,
        names: Sequence[str],
        gold: Sequence[list[str]],
        query_QE: Tensor,
        forbidden: Sequence[Collection[str]] | None = None,
    ) -> list[list[str]]:
        """For each query that has a right document, wrong ones drawn among the best that the index finds.

        Fewer than asked for where the memory holds no more wrong ones. A document of the contents of a right one is
        not wrong.
        """
        o, asking = self.config.objectives, [q for q, ids in enumerate(gold) if ids]
        if not asking:
            return [[] for _ in gold]
        others = [{*ids, *barred} for ids, barred in zip(gold, forbidden or [()] * len(gold), strict=True)]
        most = max(len(others[q]) for q in asking)
        k = min(o.contrastive_mined_depth + most, len(self.memory.store))
        found, _ = self.memory.search(query_QE[asking], k=k)
        drawn: dict[int, list[str]] = {}
        for q, ids in zip(asking, found, strict=True):
            wrong = [name for name in ids if name not in others[q]][: o.contrastive_mined_depth]
            order = [keyed.seed_of("mined", self.config.train.seed, step, names[q], name) for name in wrong]
            drawn[q] = [name for _, name in sorted(zip(order, wrong, strict=True))]
        chosen: list[list[str]] = [[] for _ in gold]
        self._contents_of_right(name for ids in gold for name in ids)  # in one read
        right_contents = [self._contents_of_right(ids) for ids in gold]
        while True:
            wanted = {
                q: ids[: o.contrastive_mined_negatives - len(chosen[q])]
                for q, ids in drawn.items()
                if ids and len(chosen[q]) < o.contrastive_mined_negatives
            }
            if not wanted:
                return chosen
            seen = self._contents(name for ids in wanted.values() for name in ids)
            for q, ids in wanted.items():
                chosen[q] += [name for name in ids if seen[name] not in right_contents[q]]
                drawn[q] = drawn[q][len(ids) :]

    def positive(self, gold: Sequence[list[str]], unique: Sequence[str], documents: Sequence[Document]) -> Tensor:
        """Which of the batch's documents is right for which query (Q, U): those listed, and those of their contents.

        Args:
            documents: the batch's; this rank has the pictures of those that its towers embed.
        """
        place = {name: row for row, name in enumerate(unique)}
        same: dict[bytes, list[int]] = {}
        for name, found in self._gathered([documents[row] for row in self._share(len(documents))]).items():
            same.setdefault(found, []).append(place[name])
        self._contents_of_right(name for ids in gold for name in ids)  # in one read
        positive = torch.zeros(len(gold), len(unique), dtype=torch.bool)
        for q, ids in enumerate(gold):
            positive[q, [place[name] for name in ids if name in place]] = True
            positive[q, [row for found in self._contents_of_right(ids) for row in same.get(found, ())]] = True
        return positive

    def _contents_of_right(self, names: Iterable[str]) -> set[bytes]:
        names = set(names)
        self._right |= self._contents(name for name in names if name not in self._right)
        return {self._right[name] for name in names}

    def _contents(self, names: Iterable[str]) -> dict[str, bytes]:
        ids = sorted(set(names))
        return self._gathered(self.memory.fetch([ids[i] for i in self._share(len(ids))])) if ids else {}

    def _share(self, count: int) -> list[int]:
        rows: list[int] = self.towers.share(count).tolist()
        return rows

    def _gathered(self, mine: Sequence[Document]) -> dict[str, bytes]:
        """Digests by id of every rank's documents; of several of one document, that of the lowest rank."""
        whole: dict[str, bytes] = {}
        for digests in self.mesh.gather({document.id: contents(document) for document in mine}):
            whole = digests | whole
        return whole


def contents(document: Document) -> bytes:
    """A digest of what the retriever sees of a document; its id's where that is nothing, which equals nothing."""
    assert not isinstance(document.image, Unread), "the picture of a document is looked at where it was not read"
    seen = document.search_text.strip("\n")
    if document.problem is not None or (not seen and document.image is None):
        return b"id " + document.id.encode()
    hashed = hashlib.blake2b(seen.encode(), digest_size=16)
    hashed.update(b"\0" + (document.image or b""))
    return hashed.digest()
