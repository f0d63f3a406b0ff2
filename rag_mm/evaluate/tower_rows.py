"""Rows of words or pictures alone, embedded by a run's towers on any layout, kept in parts as they come.

Rows are embedded in blocks of 64 neighbours and kept in parts of 1,024, one file each: replicas share the parts out, a
part that is there is not made again, and no layout moves a bit. All ranks of a layout make the same calls.

Shapes: n rows, E embedding width.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from rag_mm.evaluate.answer import Interrupted, Run
from rag_mm.evaluate.retrieval import BLOCK
from retriever.embed import pictures
from retriever.features import Side
from retriever.shared_disk import patiently

PART = 16 * BLOCK  # rows of a file


@dataclass(frozen=True)
class Embedded:
    """Embeddings of rows.

    Attributes:
        embedding: shape (n, E).
        broken: rows whose picture is not there or cannot be decoded, shape (n,).
        truncated: how many texts were cut off.
    """

    embedding: NDArray[numpy.float32]
    broken: NDArray[numpy.bool_]
    truncated: int


def check_space(run: Run) -> None:
    """ValueError if a run's retriever does not compare words with pictures."""
    config = run.config.retriever
    parts = run.model.encoder.fusion.parts
    if len(parts) < 2:
        raise ValueError(f"--tasks: the retriever of {run.directory} embeds {' and '.join(parts)} only")
    if config.fusion == "blocks":
        raise ValueError(
            f"--tasks: retriever.fusion of {run.directory} is blocks, in which words and pictures have coordinates of "
            "their own, so no text finds a picture; this needs a run with fusion mean or learned"
        )


def embed_pictures(run: Run, images: Sequence[bytes | None], *, side: Side, broken: dict[int, str]) -> Embedded:
    """Pictures without words; ``broken`` is told which cannot be decoded, and why."""
    data = run.config.data
    image, has_image = pictures(images, data.image_size, transform=data.image_transform, broken=broken)
    embedding = run.layout.embed(run.layout.encoder.features([""] * len(images), image, has_image, side=side))
    return Embedded(embedding.float().numpy(), has_image.numpy() == 0, 0)


def embed_texts(run: Run, texts: Sequence[str], *, side: Side) -> Embedded:
    """Texts without pictures."""
    encoder, size = run.layout.encoder, run.config.data.image_size
    before = encoder.featurizer.truncated
    blank, none = torch.ones(len(texts), 3, size, size), torch.zeros(len(texts))
    embedding = run.layout.embed(encoder.features(texts, blank, none, side=side))
    return Embedded(
        embedding.float().numpy(), numpy.zeros(len(texts), dtype=bool), encoder.featurizer.truncated - before
    )


def in_parts(
    run: Run,
    name: str,
    num_rows: int,
    folder: Path,
    embed: Callable[[range], Embedded],
    *,
    progress: Callable[[int], None],
    interrupt: Callable[[], bool] | None = None,
) -> Embedded | None:
    """All rows on the first rank, None on the others, from parts that this and earlier calls made.

    Args:
        name: of the parts.
        folder: keeps them.
        embed: some neighbouring rows.
        progress: called with a number of rows that are done.
        interrupt: asked after each part whether to stop.

    Raises:
        Interrupted: on every rank, if any was asked to stop.
    """
    mesh = run.layout.mesh
    parts = [range(start, min(start + PART, num_rows)) for start in range(0, num_rows, PART)]
    paths = [folder / f"{name}-{part.start:09d}.npz" for part in parts]
    there = mesh.broadcast([path.exists() for path in paths] if mesh.is_first else None)
    progress(sum(len(part) for part, done in zip(parts, there, strict=True) if done))
    todo = [i for i, done in enumerate(there) if not done]
    for first in range(0, len(todo), mesh.num_replicas):
        count = 0
        for i in todo[first : first + mesh.num_replicas][mesh.replica : mesh.replica + 1]:
            rows = parts[i]
            made = _joined([embed(rows[start : start + BLOCK]) for start in range(0, len(rows), BLOCK)])
            if run.layout.searches:
                count = len(rows)
                write_arrays(
                    paths[i], embedding=made.embedding, broken=made.broken, truncated=numpy.array(made.truncated)
                )
        told = mesh.gather((count, interrupt is not None and interrupt()))
        progress(sum(done for done, _ in told))
        if any(asked for _, asked in told):
            raise Interrupted("interrupted; what is embedded is safe, run the same command to go on")
    if not mesh.is_first:
        return None
    wait_s = run.config.checkpoint.visible_s  # what another machine wrote may be seen late
    return _joined([patiently(functools.partial(_read, path), folder=folder, limit_s=wait_s) for path in paths])


def _joined(parts: Sequence[Embedded]) -> Embedded:
    return Embedded(
        numpy.concatenate([part.embedding for part in parts]),
        numpy.concatenate([part.broken for part in parts]),
        sum(part.truncated for part in parts),
    )


def _read(path: Path) -> Embedded:
    with numpy.load(path, allow_pickle=False) as file:
        return Embedded(file["embedding"], file["broken"], int(file["truncated"]))


def write_arrays(path: Path, **arrays: NDArray[Any]) -> None:
    """An npz, the whole file or none."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        numpy.savez(file, allow_pickle=False, **arrays)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
