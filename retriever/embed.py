"""Embedding the memory: documents in, vectors out, in batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from data.document_store import Document, DocumentStore
from data.images import ImageError, decode
from data.transforms import SQUARE
from retriever.encoder import DualEncoder
from retriever.index import Manifest

DOCUMENT = "document."  # begins the names of the weights of the documents' own side


def pictures(
    pngs: Sequence[bytes | None], size: int, *, transform: str = SQUARE, broken: dict[int, str] | None = None
) -> tuple[Tensor, Tensor]:
    """Pictures (N, 3, size, size) float in [0, 1], white where there is none, and which exist (N,) float.

    Args:
        broken: is told the rows whose picture cannot be decoded, and why; they are as if there were none.

    Raises:
        ImageError: a picture cannot be decoded, and there is no ``broken`` to be told.
    """
    image, exists = torch.ones(len(pngs), 3, size, size), torch.tensor([float(png is not None) for png in pngs])
    for i, png in enumerate(pngs):
        if png is None:
            continue
        try:
            image[i] = decode(png, size, transform=transform) / 255
        except ImageError as error:
            if broken is None:
                raise
            broken[i], exists[i] = error.reason, 0.0
    return image, exists


def document_features(
    encoder: DualEncoder, documents: Sequence[Document], *, image_size: int, broken: dict[int, str] | None = None
) -> dict[str, Tensor]:
    """What is embedded of a document: its title, its passage and its picture.

    Args:
        broken: as of `pictures`.
    """
    image, has_image = pictures(
        [d.image for d in documents], image_size, transform=encoder.image_transform, broken=broken
    )
    return encoder.features([d.search_text for d in documents], image, has_image, side="document")


def stored_features(
    encoder: DualEncoder, store: DocumentStore, ids: Sequence[str], *, image_size: int
) -> dict[str, Tensor]:
    """The same of documents of a store. What is damaged counts in ``store.bad`` and is as if it were not there."""
    documents, broken = store.read(ids), dict[int, str]()
    features = document_features(encoder, documents, image_size=image_size, broken=broken)
    for row, reason in broken.items():
        store.condemn(documents[row].id, reason)
    return features


def embedded_batches(
    encoder: DualEncoder,
    store: DocumentStore,
    ids: Sequence[str],
    *,
    image_size: int,
    batch_size: int,
    progress: Callable[[int], None] | None = None,
    embed: Callable[[dict[str, Tensor]], Tensor] | None = None,
) -> Iterator[Tensor]:
    """Embeddings (B, E) of documents, as `stored_features` reads them, one batch after the other.

    Args:
        progress: called with the number of documents done after each batch.
        embed: from features to embeddings, where the encoder is not whole on this process.
    """
    embed = encoder if embed is None else embed
    for start in range(0, len(ids), batch_size):
        mine = ids[start : start + batch_size]
        with torch.no_grad():
            embedding_BE = embed(stored_features(encoder, store, mine, image_size=image_size))
        yield embedding_BE
        if progress is not None:
            progress(len(mine))


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
    """The same (len(ids), E) in one tensor."""
    batches = embedded_batches(
        encoder, store, ids, image_size=image_size, batch_size=batch_size, progress=progress, embed=embed
    )
    return torch.cat([torch.zeros(0, encoder.dim), *batches])


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


def document_hash(hashes: Mapping[str, str]) -> str:
    """The same over the weights that documents are embedded with: those of their own side, if they have one."""
    own = {name: digest for name, digest in hashes.items() if name.startswith(DOCUMENT)}
    return combined_hash(own or hashes)


def weights_hash(encoder: DualEncoder) -> str:
    """16 hex digits over all weights by name."""
    return combined_hash(tensor_hashes(encoder.state_dict()))


def make_manifest(
    encoder: DualEncoder, store: DocumentStore, *, image_size: int, weights: str | None = None
) -> Manifest:
    """What an index of this store by this encoder says of itself; ``weights`` where the documents' hash is known."""
    return Manifest(
        encoder=architecture(encoder, image_size=image_size),
        weights=document_hash(tensor_hashes(encoder.state_dict())) if weights is None else weights,
        store=store.fingerprint,
        num_edits=store.num_edits,
        dim=encoder.dim,
        count=len(store),
    )
