"""Image-text retrieval by a run's own towers: the pictures of the memory, and the texts that belong to them.

The pool of a split is every text of ``pairs/SPLIT`` and every document that is right for one, in the order of the
pairs. A picture is embedded alone, as a document without words (a title beside it would give the answer away), and a
text as a question; one matrix of inner products ranks both ways. What counts as right and the protocols (COCO's folds,
Flickr30k's 1,000) are `rag_mm.evaluate.tasks.image_text`'s, as for anybody's embeddings.

Rows are embedded in blocks of 64 neighbours and kept in parts of 1,024, one file each: replicas share the parts out, a
part that is there is not made again, and no layout moves a bit. All ranks of a layout make the same calls.

Shapes: T texts, I pictures, E embedding width.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from data.dataset import Dataset
from data.samples import Pair
from rag_mm.evaluate.answer import Interrupted, Run
from rag_mm.evaluate.retrieval import BLOCK
from rag_mm.evaluate.tasks.image_text import ImageText
from rag_mm.evaluate.tasks.image_text_files import Similarities
from rag_mm.evaluate.tasks.task import named
from retriever.embed import pictures

PART = 16 * BLOCK  # rows of a file


@dataclass(frozen=True)
class Pool:
    """What is ranked.

    Attributes:
        references: the text ids of every picture, which has its document's id; the same of every task.
        text_ids: in the order of the split, as are ``places``.
        places: of the texts in ``pairs/SPLIT``.
    """

    references: dict[str, tuple[str, ...]]
    text_ids: tuple[str, ...]
    places: tuple[int, ...]

    @property
    def image_ids(self) -> tuple[str, ...]:
        return tuple(self.references)

    @property
    def num_rows(self) -> int:
        return len(self.references) + len(self.text_ids)


def make_pool(dataset: Dataset, split: str, tasks: Sequence[ImageText]) -> Pool:
    """The pool of a split.

    Raises:
        ValueError: if it has no pairs of a text and one picture, or they are not what ``tasks`` are about.
    """
    texts: list[Pair] = []
    places: list[int] = []
    for place, pair in enumerate(dataset.pairs(split).scan()):
        if pair.weight and pair.text and pair.image is None and pair.gold:
            texts.append(pair)
            places.append(place)
    if not texts:
        raise ValueError(
            f"--tasks names {tasks[0].name}, but pairs/{split} of {dataset.directory} has no text with a right document"
        )
    try:
        references = tasks[0].references_of(texts)
        for task in tasks:
            task.check(references)
    except ValueError as error:
        raise ValueError(f"--tasks: pairs/{split} of {dataset.directory}: {error}") from None
    return Pool(references, tuple(pair.id for pair in texts), tuple(places))


def check_space(run: Run) -> None:
    """ValueError if a run's retriever does not compare words with pictures."""
    config = run.config.retriever
    parts = run.model.encoder.fusion.parts
    if len(parts) < 2:
        raise ValueError(f"--tasks: the retriever of {run.directory} embeds {' and '.join(parts)} only")
    if config.fusion == "blocks":
        raise ValueError(
            f"--tasks: retriever.fusion of {run.directory} is blocks, in which words and pictures have coordinates of "
            "their own, so no text finds a picture; image-text retrieval needs a run with fusion mean or learned"
        )


@dataclass(frozen=True)
class Embedded:
    """Rows of one side of the pool.

    Attributes:
        embedding: shape (n, E).
        broken: rows whose picture is not there or cannot be decoded, shape (n,).
        truncated: how many texts were cut off.
    """

    embedding: NDArray[numpy.float32]
    broken: NDArray[numpy.bool_]
    truncated: int


def embed_pool(
    run: Run,
    pool: Pool,
    split: str,
    folder: Path,
    *,
    progress: Callable[[int], None],
    interrupt: Callable[[], bool] | None = None,
) -> tuple[Similarities, list[str]] | None:
    """Embeddings of the pool, and sentences about what was not as it should be, on the first rank; None on the others.

    Args:
        folder: keeps the parts that are done.
        progress: called with a number of rows that are done.

    Raises:
        Interrupted: on every rank, if any was asked to stop.
    """

    def images_of(rows: range) -> Embedded:
        return _embed_pictures(run, pool.image_ids[rows.start : rows.stop])

    def texts_of(rows: range) -> Embedded:
        pairs = run.dataset.pairs(split).read_unlooked(pool.places[rows.start : rows.stop])
        return _embed_texts(run, [pair.text for pair in pairs])

    sides = (("images", len(pool.references), images_of), ("texts", len(pool.text_ids), texts_of))
    images, texts = (
        _in_parts(run, name, count, folder, embed, progress=progress, interrupt=interrupt)
        for name, count, embed in sides
    )
    if images is None or texts is None:
        return None
    notes = []
    if images.broken.any():
        ids = [pool.image_ids[i] for i in numpy.flatnonzero(images.broken)]
        notes.append(f"pictures: {len(ids)} of the pool are not whole and stay in it: {named(ids)}")
    if texts.truncated:
        notes.append(f"texts: {texts.truncated} of {len(pool.text_ids)} truncated")
    return Similarities(pool.image_ids, pool.text_ids, images.embedding, texts.embedding), notes


def write_embeddings(path: Path, similarities: Similarities) -> None:
    """An npz that ``python -m rag_mm.evaluate.score`` reads as predictions."""
    assert similarities.texts is not None
    _write(
        path,
        image_ids=numpy.array(similarities.image_ids),
        text_ids=numpy.array(similarities.text_ids),
        image_embeddings=similarities.images,
        text_embeddings=similarities.texts,
    )


def _embed_pictures(run: Run, ids: Sequence[str]) -> Embedded:
    data, store, broken = run.config.data, run.dataset.store, dict[int, str]()
    found = [document.image for document in store.read(ids)]
    image, has_image = pictures(found, data.image_size, transform=data.image_transform, broken=broken)
    for row, reason in broken.items():
        store.condemn(ids[row], reason)
    embedding = run.layout.embed(run.layout.encoder.features([""] * len(ids), image, has_image, side="document"))
    return Embedded(embedding.float().numpy(), has_image.numpy() == 0, 0)


def _embed_texts(run: Run, texts: Sequence[str]) -> Embedded:
    encoder, size = run.layout.encoder, run.config.data.image_size
    before = encoder.featurizer.truncated
    blank, none = torch.ones(len(texts), 3, size, size), torch.zeros(len(texts))
    embedding = run.layout.embed(encoder.features(texts, blank, none, side="query"))
    return Embedded(
        embedding.float().numpy(), numpy.zeros(len(texts), dtype=bool), encoder.featurizer.truncated - before
    )


def _in_parts(
    run: Run,
    name: str,
    num_rows: int,
    folder: Path,
    embed: Callable[[range], Embedded],
    *,
    progress: Callable[[int], None],
    interrupt: Callable[[], bool] | None,
) -> Embedded | None:
    """All rows on the first rank, from parts that this and earlier calls made."""
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
                _write(paths[i], embedding=made.embedding, broken=made.broken, truncated=numpy.array(made.truncated))
        told = mesh.gather((count, interrupt is not None and interrupt()))
        progress(sum(done for done, _ in told))
        if any(asked for _, asked in told):
            raise Interrupted("interrupted; what is embedded is safe, run the same command to go on")
    return _joined([_read(path) for path in paths]) if mesh.is_first else None


def _joined(parts: Sequence[Embedded]) -> Embedded:
    return Embedded(
        numpy.concatenate([part.embedding for part in parts]),
        numpy.concatenate([part.broken for part in parts]),
        sum(part.truncated for part in parts),
    )


def _read(path: Path) -> Embedded:
    with numpy.load(path, allow_pickle=False) as file:
        return Embedded(file["embedding"], file["broken"], int(file["truncated"]))


def _write(path: Path, **arrays: NDArray[Any]) -> None:
    """The whole file or none."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        numpy.savez(file, allow_pickle=False, **arrays)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
