"""Embedding the memory: documents in, vectors out, in batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from data.document_store import Document, DocumentStore
from data.images import decode
from data.transforms import SQUARE
from retriever.encoder import DualEncoder
from retriever.index import Manifest


def pictures(pngs: Sequence[bytes | None], size: int, *, transform: str = SQUARE) -> tuple[Tensor, Tensor]:
    """Pictures (N, 3, size, size) float in [0, 1], white where there is none, and which exist (N,) float."""
    image = torch.ones(len(pngs), 3, size, size)
    for i, png in enumerate(pngs):
        if png is not None:
            image[i] = decode(png, size, transform=transform) / 255
    return image, torch.tensor([float(png is not None) for png in pngs])


def document_features(encoder: DualEncoder, documents: Sequence[Document], *, image_size: int) -> dict[str, Tensor]:
    """What is embedded of a document: its title, its passage and its picture."""
    image, has_image = pictures([d.image for d in documents], image_size, transform=encoder.image_transform)
    return encoder.features([d.search_text for d in documents], image, has_image, side="document")


@torch.no_grad()
def embed_documents(
    encoder: DualEncoder,
    store: DocumentStore,
    ids: Sequence[str],
    *,
    image_size: int,
    batch_size: int,
    progress: Callable[[int], None] | None = None,
    embed: Callable[[dict[str, Tensor]], Tensor] | None = None,
) -> Tensor:
    """Embeddings (len(ids), E) of documents.

    Args:
        progress: called with the number of documents done after each batch.
        embed: from features to embeddings, where the encoder is not whole on this process.
    """
    embed = encoder if embed is None else embed
    parts = [torch.zeros(0, encoder.dim)]
    for start in range(0, len(ids), batch_size):
        documents = store.fetch(ids[start : start + batch_size])
        parts.append(embed(document_features(encoder, documents, image_size=image_size)))
        if progress is not None:
            progress(len(documents))
    return torch.cat(parts)


def architecture(encoder: DualEncoder, *, image_size: int) -> str:
    """A string that names everything but the weights that decides what an embedding means."""
    if _plain(encoder):  # as this string was before there were other kinds
        shapes = ("text_buckets", "text_dim", "image_dim", "image_width", "image_patch")
        described = {k: v for k, v in asdict(encoder.config).items() if k in shapes}
    else:
        described = encoder.describe()
    if encoder.image_transform != SQUARE:
        described["image_transform"] = encoder.image_transform
    return "dual_encoder " + json.dumps({**described, "image_size": image_size}, sort_keys=True)


def _plain(encoder: DualEncoder) -> bool:
    config = encoder.config
    kinds = (config.text, config.image, config.fusion, config.query_prefix, config.document_prefix)
    return kinds == ("trigrams", "small", "blocks", "", "") and encoder.document is None


def tensor_hashes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A hash of each tensor's bytes."""
    return {
        name: hashlib.blake2b(tensor.detach().cpu().contiguous().numpy().tobytes(), digest_size=8).hexdigest()
        for name, tensor in tensors.items()
    }


def combined_hash(hashes: Mapping[str, str]) -> str:
    """16 hex digits over all weights by name, from each one's hash (which may come from another rank)."""
    text = "\n".join(f"{name} {hashes[name]}" for name in sorted(hashes))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def weights_hash(encoder: DualEncoder) -> str:
    """16 hex digits over all weights by name."""
    return combined_hash(tensor_hashes(encoder.state_dict()))


def make_manifest(
    encoder: DualEncoder, store: DocumentStore, *, image_size: int, weights: str | None = None
) -> Manifest:
    """What an index of this store by this encoder says of itself; ``weights`` where the hash is known already."""
    return Manifest(
        encoder=architecture(encoder, image_size=image_size),
        weights=weights_hash(encoder) if weights is None else weights,
        store=store.fingerprint,
        num_edits=store.num_edits,
        dim=encoder.dim,
        count=len(store),
    )
