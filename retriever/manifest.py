"""What an index version says of itself, and what it must be to be used.

The manifest is the one place that is trusted to describe the other files, so it carries a checksum of itself, and
every field is checked for its type and range before a byte of the vectors is read.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from data.json_files import read_json

ANEW = "build the index again, or restore it from a copy"
METRIC = "inner product"
TEMPLATE = "title, passage, picture"  # `retriever.embed.document_features`
LARGEST_DIM, LARGEST_COUNT = 1 << 20, 1 << 40
# What decides whether an index fits; the others say how it was made or what its files are.
IDENTITY = ("encoder", "weights", "store", "num_edits", "dim", "count", "template", "metric")


@dataclass(frozen=True)
class Manifest:
    """What an index version was made of.

    Attributes:
        encoder: the encoder's architecture and preprocessing (``retriever.embed.architecture``).
        weights: hash of the encoder's weights; must match for evaluation, may lag in training.
        store: fingerprint of the document store's shards.
        num_edits: edits of the store that the vectors cover.
        dim: width of a vector.
        count: documents that can be found, one vector each.
        template: what of a document is embedded.
        factory: faiss factory string of ``index.faiss``; a flat index is exact.
        metric: how vectors are compared.
        effort: lists that a search visits (IVF), or candidates that it keeps (HNSW); 0: all.
        recall_at_10: share of the exact ten best that a search with this effort finds; -1: not measured.
        recall_queries: queries that this was measured with.
        num_added: documents that came after ``index.faiss`` was made, in ``added.faiss``.
        num_dead: vectors whose documents are gone or have a newer one.
        num_damaged: documents that the build job found damaged and embedded as empty ones; since then at most so many.
        sha256: of ``index.faiss``.
        ids_sha256: of ``ids``.
        added_sha256: of ``added.faiss``, empty without one.
        dead_sha256: of ``dead``, empty without one.
    """

    encoder: str
    weights: str
    store: str
    num_edits: int
    dim: int
    count: int
    template: str = TEMPLATE
    factory: str = "Flat"
    metric: str = METRIC
    effort: int = 0
    recall_at_10: float = -1.0
    recall_queries: int = 0
    num_added: int = 0
    num_dead: int = 0
    num_damaged: int = 0
    sha256: str = ""
    ids_sha256: str = ""
    added_sha256: str = ""
    dead_sha256: str = ""

    @property
    def num_rows(self) -> int:
        """Vectors of both files, the dead ones included."""
        return self.count + self.num_dead

    @property
    def num_base(self) -> int:
        """Vectors of ``index.faiss``."""
        return self.num_rows - self.num_added

    @property
    def overhead(self) -> float:
        """Share of the rows that are dead or were added later."""
        return (self.num_dead + self.num_added) / max(1, self.num_rows)

    def check(self, needed: Manifest, *, where: str) -> None:
        """Refuse an index that does not fit what is needed; it may cover fewer edits (and documents), but not more.

        Raises:
            ValueError: names the first field that differs, with both values.
        """
        for name in IDENTITY:
            mine, value = getattr(self, name), getattr(needed, name)
            fits = mine <= value if name == "num_edits" else mine == value
            if name == "count" and self.num_edits < needed.num_edits:
                fits = True  # edits add and delete documents
            if not fits:
                raise ValueError(f"the index at {where} does not fit: its {name} is {mine!r}, needed is {value!r}")

    def is_of(self, other: Manifest) -> bool:
        """Whether both hold the same vectors, or this one a part of them."""
        return all(getattr(self, name) == getattr(other, name) for name in IDENTITY if name != "count")

    def write(self, path: Path) -> None:
        document = asdict(self)
        document["checksum"] = _checksum(document)
        path.write_text(json.dumps(document, indent=2) + "\n")


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged or makes no sense; names the file.
    """
    document = read_json(path, largest=1 << 20, advice=ANEW)
    kinds = {"int": int, "str": str, "float": float}
    known = {field.name: kinds[str(field.type)] for field in fields(Manifest)}
    checksum = document.pop("checksum", None)
    if checksum != _checksum(document):
        raise ValueError(f"{path} is damaged: its contents do not have the checksum in it; {ANEW}")
    if document.keys() != known.keys() or any(type(document[name]) is not kind for name, kind in known.items()):
        raise ValueError(f"{path} is not a manifest of this version; {ANEW}")
    manifest = Manifest(**document)
    if manifest.metric != METRIC:
        raise ValueError(f"{path} names the metric {manifest.metric!r}; this version reads {METRIC!r}; {ANEW}")
    counts = (
        manifest.count, manifest.num_dead, manifest.num_added, manifest.num_base, manifest.effort, manifest.num_damaged
    )  # fmt: skip
    if not 1 <= manifest.dim <= LARGEST_DIM or not all(0 <= n <= LARGEST_COUNT for n in counts):
        raise ValueError(f"{path} is damaged: {manifest.count} vectors of width {manifest.dim}; {ANEW}")
    if not math.isfinite(manifest.recall_at_10):
        raise ValueError(f"{path} is damaged: recall_at_10 is {manifest.recall_at_10}; {ANEW}")
    return manifest


def _checksum(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
