"""The index: which documents score highest for a query, and from which weights and store it was made.

An index folder holds ``versions/<n>/{index.faiss, ids.json, manifest.json}`` and ``CURRENT``, one line with
the current version's number, replaced atomically after the version is whole; readers never see half of one.
The manifest says what made the vectors and how many there are; what does not match is refused with both
sides named, and a file whose checksum is off is refused before faiss parses it.

Index scores only choose candidates. Ties break by document id, so equal vectors give one order everywhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from data.json_files import read_json, read_regular
from retriever.durable_files import sha256, sync
from retriever.faiss_import import faiss

TIE_MARGIN = 16
ANEW = "build the index again, or restore it from a copy"
VERSION = re.compile(r"0|[1-9][0-9]{0,17}")
# faiss/impl/index_write.cpp: "IxFI", dimension, count, two dummies, trained, metric (0: inner product), floats.
FLAT_HEADER = struct.Struct("<4siqqq?iQ")


@dataclass(frozen=True)
class Manifest:
    """What an index version was made of.

    Attributes:
        encoder: the encoder's architecture and preprocessing (``retriever.embed.architecture``).
        weights: hash of the encoder's weights; must match for evaluation, may lag in training.
        store: fingerprint of the document store's shards.
        num_edits: edits of the store that the vectors cover.
        dim: width of a vector.
        count: vectors, one for each document.
        template: what of a document is embedded.
        factory: faiss factory string; a flat index is exact.
        metric: how vectors are compared.
        sha256: of ``index.faiss``.
        ids_sha256: of ``ids.json``.
    """

    encoder: str
    weights: str
    store: str
    num_edits: int
    dim: int
    count: int
    template: str = "title, picture"
    factory: str = "Flat"
    metric: str = "inner product"
    sha256: str = ""
    ids_sha256: str = ""

    def check(self, needed: Manifest, *, where: str) -> None:
        """Refuse an index that does not fit what is needed; it may cover fewer edits (and documents), but not more.

        Raises:
            ValueError: names the first field that differs, with both values.
        """
        for name, value in asdict(needed).items():
            mine = getattr(self, name)
            fits = mine <= value if name == "num_edits" else mine == value
            if name == "count" and self.num_edits < needed.num_edits:
                fits = True  # edits add and delete documents
            if name not in ("sha256", "ids_sha256") and not fits:
                raise ValueError(f"the index at {where} does not fit: its {name} is {mine!r}, needed is {value!r}")


class Index:
    """One version, loaded: exact inner-product search over all documents."""

    def __init__(self, vectors: Any, ids: Sequence[str], manifest: Manifest) -> None:
        self._vectors, self.ids, self.manifest = vectors, list(ids), manifest
        if not vectors.ntotal == len(self.ids) == manifest.count:
            raise ValueError(
                f"index and documents are out of step: {vectors.ntotal} vectors, {len(self.ids)} ids, "
                f"{manifest.count} in the manifest"
            )

    @classmethod
    def from_embeddings(cls, embedding_UE: Tensor, ids: Sequence[str], manifest: Manifest) -> Index:
        """A flat index of embeddings (U, E), one for each id."""
        vectors = faiss.IndexFlatIP(embedding_UE.shape[1])
        vectors.add(embedding_UE.detach().float().contiguous().numpy())
        return cls(vectors, ids, manifest)

    def search(self, query_BE: Tensor, *, k: int) -> tuple[list[list[str]], Tensor]:
        """Ids of the k best documents of each query, best first, and their scores (B, k).

        Raises:
            ValueError: if k exceeds the number of documents.
        """
        if not 1 <= k <= len(self.ids):
            raise ValueError(
                f"k is {k}; the memory holds {len(self.ids)} documents, so 1 to {len(self.ids)} are allowed"
            )
        wide = min(len(self.ids), k + TIE_MARGIN)
        score, row = self._vectors.search(query_BE.detach().float().contiguous().numpy(), wide)
        found, best = [], numpy.zeros((len(row), k), dtype=numpy.float32)
        for b in range(len(row)):
            order = sorted(zip(-score[b], (self.ids[i] for i in row[b]), strict=True))[:k]
            found.append([name for _, name in order])
            best[b] = [-s for s, _ in order]
        return found, torch.from_numpy(best)

    def replaced(
        self, ids: Sequence[str], embedding_UE: Tensor, *, num_edits: int, gone: Collection[str] = ()
    ) -> Index:
        """A copy in which ``ids`` have new vectors, those it did not hold yet at the end, and ``gone`` are left out."""
        rows = [row for row, name in enumerate(self.ids) if name not in set(gone)]
        kept = [self.ids[row] for row in rows]
        place = {name: i for i, name in enumerate(kept)}
        new = [name for name in ids if name not in place]
        place |= {name: len(kept) + i for i, name in enumerate(new)}
        matrix = numpy.empty((len(place), self.manifest.dim), dtype=numpy.float32)
        matrix[: len(kept)] = self._vectors.reconstruct_n(0, len(self.ids))[rows]
        for row, name in enumerate(ids):
            matrix[place[name]] = embedding_UE[row].detach().float().numpy()
        manifest = replace(self.manifest, num_edits=num_edits, count=len(place))
        return Index.from_embeddings(torch.from_numpy(matrix), [*kept, *new], manifest)

    def publish(self, directory: str | Path, *, version: int | None = None) -> int:
        """Write this index as a version of ``directory`` and make it current; gives the version's number.

        Raises:
            OSError: if it could not be written; what was current before still is.
        """
        directory = Path(directory)
        versions = directory / "versions"
        versions.mkdir(parents=True, exist_ok=True)
        if version is None:
            version = max([-1, *list_versions(directory)]) + 1
        temporary = versions / f".{version}.{os.getpid()}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            faiss.write_index(self._vectors, str(temporary / "index.faiss"))
            (temporary / "ids.json").write_text(json.dumps(self.ids))
            manifest = replace(
                self.manifest, sha256=sha256(temporary / "index.faiss"), ids_sha256=sha256(temporary / "ids.json")
            )
            document = asdict(manifest)
            document["checksum"] = _checksum(document)
            (temporary / "manifest.json").write_text(json.dumps(document, indent=2) + "\n")
            for path in (*temporary.iterdir(), temporary):
                sync(path)
        except (OSError, RuntimeError) as error:  # faiss raises the latter when a disk is full
            shutil.rmtree(temporary, ignore_errors=True)
            raise OSError(f"index version {version} of {directory} could not be written: {error}") from error
        final = versions / str(version)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        sync(versions)
        pointer = directory / f".CURRENT.{os.getpid()}"
        pointer.write_text(f"{version}\n")
        sync(pointer)
        pointer.replace(directory / "CURRENT")
        sync(directory)
        self.manifest = manifest
        return version


def load(directory: str | Path, *, version: int | None = None) -> Index:
    """Load a version (default: the current one).

    Raises:
        FileNotFoundError: if there is none; says which command makes one.
        ValueError: if a file is damaged, or is not what this program writes; names it.
    """
    directory = Path(directory)
    if version is None:
        version = _current(directory)
    folder = directory / "versions" / str(version)
    path = folder / "index.faiss"
    try:
        manifest = _read_manifest(folder / "manifest.json")
        _check_file(folder / "ids.json", manifest.ids_sha256)
        ids = read_json(folder / "ids.json", kind=list, advice=ANEW)
        size = FLAT_HEADER.size + 4 * manifest.dim * manifest.count
        _check_file(path, manifest.sha256, size=size)
        _check_header(path, manifest)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"index version {version} of {directory} is incomplete: {error.filename}") from None
    if not all(isinstance(name, str) for name in ids):
        raise ValueError(f"{folder / 'ids.json'} is damaged: not all of it are texts; {ANEW}")
    return Index(faiss.read_index(str(path)), ids, manifest)


def _current(directory: Path) -> int:
    """The version that ``CURRENT`` names."""
    path = directory / "CURRENT"
    try:
        text = read_regular(path, largest=64).decode("ascii", errors="replace").strip()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no index at {directory}; make one with `python -m retriever.build --config ... --index.dir {directory}`"
        ) from None
    if not VERSION.fullmatch(text):
        raise ValueError(f"{path} is damaged: it holds {text!r}, not the number of a version; {ANEW}")
    return int(text)


def _read_manifest(path: Path) -> Manifest:
    document = read_json(path, largest=1 << 20, advice=ANEW)
    known = {field.name: {"int": int, "str": str}[str(field.type)] for field in fields(Manifest)}
    checksum = document.pop("checksum", None)
    if checksum != _checksum(document):
        raise ValueError(f"{path} is damaged: its contents do not have the checksum in it; {ANEW}")
    if document.keys() != known.keys() or any(type(document[name]) is not kind for name, kind in known.items()):
        raise ValueError(f"{path} is not a manifest of this version; {ANEW}")
    manifest = Manifest(**document)
    if manifest.factory != "Flat" or manifest.metric != "inner product":
        raise ValueError(f"{path} names a {manifest.factory} index; this version reads flat ones; {ANEW}")
    if not 1 <= manifest.dim <= 1 << 20 or not 0 <= manifest.count <= 1 << 40:
        raise ValueError(f"{path} is damaged: {manifest.count} vectors of width {manifest.dim}; {ANEW}")
    return manifest


def _check_file(path: Path, right: str, *, size: int | None = None) -> None:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # a pipe or a device would never end
        raise ValueError(f"{path} is not a regular file; {ANEW}")
    if size is not None and status.st_size != size:
        raise ValueError(f"{path} is damaged: it has {status.st_size} bytes, {size} are right; {ANEW}")
    if sha256(path) != right:
        raise ValueError(f"{path} is damaged: its checksum is not the manifest's; {ANEW}")


def _check_header(path: Path, manifest: Manifest) -> None:
    """Refuse all but a flat index of this size: faiss allocates what other headers claim."""
    with path.open("rb") as file:
        kind, dim, count, _, _, _, metric, num_floats = FLAT_HEADER.unpack(file.read(FLAT_HEADER.size))
    if (kind, dim, count, metric, num_floats) != (b"IxFI", manifest.dim, manifest.count, 0, dim * count):
        raise ValueError(f"{path} is not a flat index of {manifest.count} vectors of width {manifest.dim}; {ANEW}")


def _checksum(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def list_versions(directory: str | Path) -> list[int]:
    """Numbers of the versions in an index folder, ascending."""
    folder = Path(directory) / "versions"
    return sorted(int(p.name) for p in folder.iterdir() if VERSION.fullmatch(p.name)) if folder.is_dir() else []


def prune(directory: str | Path, *, keep: int, named: Collection[int] = ()) -> None:
    """Delete all versions but the newest ``keep`` and those in ``named``."""
    for version in list_versions(directory)[:-keep]:
        if version not in named:
            shutil.rmtree(Path(directory) / "versions" / str(version))
