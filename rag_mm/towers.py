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

from pipeline import Block, BlockProgram, Plan
from pipeline.ghosts import make_ghosts
from pipeline.hoist import Tower
from pipeline.padding import pad_batch
from rag_mm.mesh import Mesh
from retriever.embed import combined_hash, tensor_hashes
from retriever.encoder import DualEncoder, Features, TextTower, rows

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
        """Of all weights, the same on every rank (a collective where they are spread)."""
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
                torch.autograd.backward(self.encoder(rows(features, mine)), grad_NE[mine])

    def tensors_here(self) -> dict[str, Tensor]:
        return dict(self.encoder.state_dict())

    def release(self) -> None:
        """Nothing: all of it is needed here."""

    def weights_hash(self) -> str:
        return combined_hash(tensor_hashes(self.encoder.state_dict()))


class _Gates(nn.Module):
    """The trigrams' weights: the beginning of ``TextTower.forward``."""

    def __init__(self, text: TextTower) -> None:
        super().__init__()
        self.gate = text.gate

    def forward(self, ids_NL: Tensor, mask_NL: Tensor) -> Tensor:
        return TextTower.gates(ids_NL, mask_NL, self.gate)


class _Bag(nn.Module):
    """The weighted sum of the trigrams' vectors: the end of ``TextTower.forward``."""

    def __init__(self, text: TextTower) -> None:
        super().__init__()
        self.vector = text.vector

    def forward(self, ids_NL: Tensor, gate_NL: Tensor) -> Tensor:
        return TextTower.bag(ids_NL, gate_NL, self.vector)


class _Join(nn.Module):
    """The two parts, weighted, side by side: the end of ``DualEncoder.forward``."""

    def __init__(self, encoder: DualEncoder) -> None:
        super().__init__()
        self.log_weight = encoder.log_weight

    def forward(self, text_NE: Tensor, image_NE: Tensor, has_image_N: Tensor) -> Tensor:
        return DualEncoder.join(text_NE, image_NE, has_image_N, self.log_weight)


def tower_program(encoder: DualEncoder) -> BlockProgram:
    """The encoder as a block program, a block for every layer: features in, ``embedding`` (N, E) out.

    Blocks hold the encoder's own parameters. Names of blocks appear in plans only: checkpoints use the encoder's.
    """
    image = encoder.image
    return BlockProgram(
        [
            Block("text.gate", _Gates(encoder.text), ("trigram", "trigram_mask"), ("gate",)),
            Block("text.bag", _Bag(encoder.text), ("trigram", "gate"), ("text_part",)),
            Block("image.patch", image.patch, ("image",), ("grid",)),
            Block("image.mix", image.mix, ("grid",), ("grid",)),
            Block("image.out", image.out, ("grid",), ("image_part",)),
            Block("join", _Join(encoder), ("text_part", "image_part", "has_image"), ("embedding",)),
        ],
        inputs=("trigram", "trigram_mask", "image", "has_image"),
        outputs=("embedding",),
    )


class PipedTowers:
    """Every rank holds a part of the encoder; rows go through the parts.

    Args:
        plan: of ``tower_program(encoder)``.
        timeout_s: longest wait for another rank.
    """

    def __init__(self, encoder: DualEncoder, mesh: Mesh, plan: Plan, *, timeout_s: float) -> None:
        self.encoder, self.mesh, self.plan = encoder, mesh, plan
        self.program = tower_program(encoder)
        self.tower = Tower(self.program, plan, group=mesh.pipeline, timeout_s=timeout_s)
        own = {id(p): n for n, p in encoder.named_parameters()}
        pipeline = self.tower.pipeline
        self._here = {own[id(p)]: p for p in pipeline.parameters_here.values()}
        self.owned = frozenset(own[id(pipeline.parameters_here[n])] for n in pipeline.owned)
        self.sharded = {n: p for n, p in self._here.items() if p.requires_grad}
        self.replicated = {"log_scale": encoder.log_scale}

    def share(self, count: int) -> Tensor:
        return torch.arange(count)[self.mesh.replica :: self.mesh.num_replicas]

    def embed_share(self, features: Features) -> Tensor:
        count = features["image"].shape[0]
        if not count:
            return torch.zeros(0, self.encoder.dim, dtype=self.encoder.log_scale.dtype)
        return self.tower.embed(self._bucketed(features), seed=0, step=0)["embedding"][:count]

    def join(self, part: Tensor, count: int) -> Tensor:
        whole = part.new_zeros(count, part.shape[1])
        whole[self.share(count)] = part
        self.mesh.sum([whole], group=self.mesh.replicas)
        return whole

    def backward(self, features: Features, grad_NE: Tensor) -> None:
        mine = self.share(grad_NE.shape[0])
        with self.mesh.summed_gradients(self.sharded.values(), group=self.mesh.replicas):
            if mine.numel():
                padded = self._bucketed(rows(features, mine))
                grad = grad_NE.new_zeros(padded["image"].shape[0], grad_NE.shape[1])
                grad[: mine.numel()] = grad_NE[mine]
                self.tower.backward(padded, {"embedding": grad}, seed=0, step=0)

    def _bucketed(self, features: Features) -> dict[str, Tensor]:
        """Few shapes: rows and trigrams filled up with what contributes nothing."""
        more = -features["trigram"].shape[1] % TRIGRAM_BUCKET
        wide = dict(features)
        for name in ("trigram", "trigram_mask"):
            wide[name] = nn.functional.pad(features[name], (0, more))
        return pad_batch(self.program, wide, multiple=ROW_BUCKET, weights=())

    def tensors_here(self) -> dict[str, Tensor]:
        return {n: t.detach() for n, t in {**self._here, **self.replicated}.items()}

    def release(self) -> None:
        self.tower.pipeline.release_other_stages()
        make_ghosts([self.encoder], keep=[*self._here.values(), *self.replicated.values()])  # it holds them too

    def weights_hash(self) -> str:
        gathered = self.mesh.gather(tensor_hashes(self.tensors_here()))
        return combined_hash({name: digest for hashes in gathered for name, digest in hashes.items()})
