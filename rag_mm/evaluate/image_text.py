"""Image-text retrieval by a run's own towers: the pictures of the memory, and the texts that belong to them.

The pool of a split is every text of ``pairs/SPLIT`` and every document that is right for one, in the order of the
pairs. A picture is embedded alone, as a document without words (a title beside it would give the answer away), and a
text as a question (`rag_mm.evaluate.tower_rows`); one matrix of inner products ranks both ways. What counts as right
and the protocols (COCO's folds, Flickr30k's 1,000) are `rag_mm.evaluate.tasks.image_text`'s, as for anybody's
embeddings. All ranks of a layout make the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy

from data.dataset import Dataset
from data.samples import Pair
from rag_mm.evaluate.answer import Run
from rag_mm.evaluate.tasks.image_text import ImageText
from rag_mm.evaluate.tasks.image_text_files import Similarities
from rag_mm.evaluate.tasks.task import named
from rag_mm.evaluate.tower_rows import Embedded, embed_pictures, embed_texts, in_parts, write_arrays


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
        ids, store, broken = pool.image_ids[rows.start : rows.stop], run.dataset.store, dict[int, str]()
        made = embed_pictures(run, [document.image for document in store.read(ids)], side="document", broken=broken)
        for row, reason in broken.items():
            store.condemn(ids[row], reason)
        return made

    def texts_of(rows: range) -> Embedded:
        pairs = run.dataset.pairs(split).read_unlooked(pool.places[rows.start : rows.stop])
        return embed_texts(run, [pair.text for pair in pairs], side="query")

    sides = (("images", len(pool.references), images_of), ("texts", len(pool.text_ids), texts_of))
    images, texts = (
        in_parts(run, name, count, folder, embed, progress=progress, interrupt=interrupt)
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
    write_arrays(
        path,
        image_ids=numpy.array(similarities.image_ids),
        text_ids=numpy.array(similarities.text_ids),
        image_embeddings=similarities.images,
        text_embeddings=similarities.texts,
    )
