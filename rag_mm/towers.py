"""The retriever's towers over the ranks: rows dealt out, or, where a tower is too large for that, piped.

Both run over the whole global batch outside the reader's pipeline: forward without graph (phase 1), and
again with graph when the gradients of the embeddings are known (phase 3). *Dealt*: every rank holds the whole
encoder and takes every n-th row; no bubble. *Piped*: a rank holds a part of it, rows go through a pipeline of
their own in micro-batches, and every replica takes every n-th row; costs a bubble and the carry, and no rank
holds the whole.

Shapes: N rows, E embedding width.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from pipeline import BlockProgram, Plan
from pipeline.ghosts import make_ghosts
from pipeline.hoist import Tower
from pipeline.padding import pad_batch
from rag_mm.mesh import Mesh
from rag_mm.tower_program import EMBEDDING, buffers_here, saved_buffers, tower_program
from retriever.embed import document_hash, tensor_hashes
from retriever.encoder import DualEncoder, EncoderSide, Features, rows

ROW_BUCKET, TRIGRAM_BUCKET = 32, 16  # few shapes: each has buffers of its own


class Towers(Protocol):
    """What the training step asks of either kind.

    Attributes:
        encoder: for its features, its scale and its width; only dealt towers can be called as a whole.
        replicated: trained parameters that every rank holds and updates alike, by the encoder's names.
        sharded: trained parameters of this rank's stages.
        owned: names in ``sharded`` that this rank counts in a norm.
    """

    encoder: DualEncoder
    replicated: dict[str, nn.Parameter]
    sharded: dict[str, nn.Parameter]
    owned: frozenset[str]

    def share(self, count: int) -> Tensor:
        """Rows of a table of ``count`` rows that this rank (or its pipeline) embeds."""
        ...

    def embed_share(self, features: Features) -> Tensor:
        """Embeddings (N, E) of this share, without graph."""
        ...

    def join(self, part: Tensor, count: int) -> Tensor:
        """The whole table (count, E) from all shares."""
        ...

    def backward(self, features: Features, grad_NE: Tensor) -> None:
        """Add to ``.grad`` what gradients on all rows' embeddings give, summed over the ranks."""
        ...

    def tensors_here(self) -> dict[str, Tensor]:
        """What this rank holds of the encoder's state, by name."""
        ...

    def release(self) -> None:
        """Free what only other ranks need."""
        ...

    def weights_hash(self) -> str:
        """Of the weights that documents are embedded with, the same on every rank (a collective where spread)."""
        ...


def embed_all(towers: Towers, features: Features) -> Tensor:
    """Embeddings of all rows (N, E), without graph, on every rank."""
    count = features["image"].shape[0]
    return towers.join(towers.embed_share(rows(features, towers.share(count))), count)


class DealtTowers:
    """Every rank holds the whole encoder."""

    def __init__(self, encoder: DualEncoder, mesh: Mesh) -> None:
        self.encoder, self.mesh = encoder, mesh
        self.replicated = {n: p for n, p in encoder.named_parameters() if p.requires_grad}
        self.sharded: dict[str, nn.Parameter] = {}
        self.owned: frozenset[str] = frozenset()

    def share(self, count: int) -> Tensor:
        return self.mesh.rows(count)

    @torch.no_grad()
    def embed_share(self, features: Features) -> Tensor:
        return self.encoder(features)

    def join(self, part: Tensor, count: int) -> Tensor:
        return self.mesh.join_rows(part, count)

    def backward(self, features: Features, grad_NE: Tensor) -> None:
        mine = self.mesh.rows(grad_NE.shape[0])
        trained = [p for n, p in self.replicated.items() if n != "log_scale"]  # that one is the objective's
        with self.mesh.summed_gradients(trained):
            if mine.numel():
                embedding = self.encoder(rows(features, mine))
                if embedding.requires_grad:  # not of a frozen side
                    torch.autograd.backward(embedding, grad_NE[mine])

    def tensors_here(self) -> dict[str, Tensor]:
        return dict(self.encoder.state_dict())

    def release(self) -> None:
        """Nothing: all of it is needed here."""

    def weights_hash(self) -> str:
        return document_hash(tensor_hashes(self.encoder.state_dict()))


class PipedTowers:
    """Every rank holds a part of the encoder; rows go through the parts.

    Args:
        plan: of ``tower_program(encoder)``; the documents' own side, if they have one, is cut alike.
        timeout_s: longest wait for another rank.
    """

    def __init__(self, encoder: DualEncoder, mesh: Mesh, plan: Plan, *, timeout_s: float) -> None:
        self.encoder, self.mesh, self.plan = encoder, mesh, plan
        own = {id(p): n for n, p in encoder.named_parameters()}
        self._programs: dict[EncoderSide, BlockProgram] = {}
        self._towers: dict[EncoderSide, Tower] = {}
        self._here: dict[str, nn.Parameter] = {}
        self._buffers: list[Tensor] = []
        owned: set[str] = set()
        for side in encoder.sides():
            program = tower_program(side)
            tower = Tower(program, plan, group=mesh.pipeline, timeout_s=timeout_s)
            self._programs[side], self._towers[side] = program, tower
            parameters = tower.pipeline.parameters_here
            self._here |= {own[id(p)]: p for p in parameters.values()}
            owned |= {own[id(parameters[n])] for n in tower.pipeline.owned}
            self._buffers += buffers_here(program, plan, mesh.stage)
        self.owned = frozenset(owned)
        self.sharded = {n: p for n, p in self._here.items() if p.requires_grad}
        self.replicated = {"log_scale": encoder.log_scale}
        self._saved_buffers = saved_buffers(encoder, self._buffers)

    def share(self, count: int) -> Tensor:
        return torch.arange(count)[self.mesh.replica :: self.mesh.num_replicas]

    def embed_share(self, features: Features) -> Tensor:
        count = features["image"].shape[0]
        if not count:
            return torch.zeros(0, self.encoder.dim, dtype=self.encoder.log_scale.dtype)
        side = self.encoder.side_of(features)
        return self._towers[side].embed(self._bucketed(side, features), seed=0, step=0)[EMBEDDING][:count]

    def join(self, part: Tensor, count: int) -> Tensor:
        whole = part.new_zeros(count, part.shape[1])
        whole[self.share(count)] = part
        self.mesh.sum([whole], group=self.mesh.replicas)
        return whole

    def backward(self, features: Features, grad_NE: Tensor) -> None:
        mine, side = self.share(grad_NE.shape[0]), self.encoder.side_of(features)
        trains = any(p.requires_grad for p in self._programs[side].parameters())
        with self.mesh.summed_gradients(self.sharded.values(), group=self.mesh.replicas):
            if mine.numel() and trains:
                padded = self._bucketed(side, rows(features, mine))
                grad = grad_NE.new_zeros(padded["image"].shape[0], grad_NE.shape[1])
                grad[: mine.numel()] = grad_NE[mine]
                self._towers[side].backward(padded, {EMBEDDING: grad}, seed=0, step=0)

    def _bucketed(self, side: EncoderSide, features: Features) -> dict[str, Tensor]:
        """Few shapes: rows and trigrams filled up with what contributes nothing."""
        wide = dict(features)
        for name in ("trigram", "trigram_mask"):
            if name in features:
                wide[name] = nn.functional.pad(features[name], (0, -features[name].shape[1] % TRIGRAM_BUCKET))
        return pad_batch(self._programs[side], wide, multiple=ROW_BUCKET, weights=())

    def tensors_here(self) -> dict[str, Tensor]:
        return {n: t.detach() for n, t in {**self._here, **self.replicated, **self._saved_buffers}.items()}

    def release(self) -> None:
        for tower in self._towers.values():
            tower.pipeline.release_other_stages()
        kept = [*self._here.values(), *self.replicated.values(), *self._buffers]
        make_ghosts([self.encoder], keep=kept)  # it holds the others too

    def weights_hash(self) -> str:
        gathered = self.mesh.gather(tensor_hashes(self.tensors_here()))
        return document_hash({name: digest for hashes in gathered for name, digest in hashes.items()})
