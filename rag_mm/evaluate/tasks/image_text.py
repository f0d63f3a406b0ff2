"""Image-text retrieval both ways: the texts of an image, the image of a text.

``coco_5k``, ``coco_1k`` (the same 5,000 images as five folds of 1,000, in the order of the references, each fold a pool
of its own) and ``flickr30k_1k`` are the field's protocols and insist on their numbers of images and on five captions an
image: ten of COCO's 5,000 have more, 25,010 in all, and the sixth and later ones are dropped, as is usual.
``image_text`` takes any pool.

From embeddings or scores every rank is exact. Ranked lists may end before the right item: it then has no rank, counts
as not found, and mean and median rank are not reported. All examples of one image are resampled together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy
from numpy.typing import NDArray

from data.samples import Pair, Sample
from rag_mm.evaluate.metric import Array, Median, Metric, Scores, mean
from rag_mm.evaluate.prediction_files import FileError
from rag_mm.evaluate.scoring.image_text import Ties, folds, rank_in_list, ranks_from_scores
from rag_mm.evaluate.tasks.image_text_files import Similarities, read_lists, read_similarities, texts_of_images
from rag_mm.evaluate.tasks.qa import check_ks
from rag_mm.evaluate.tasks.task import Aligned, Missing, Question, Task, named

WAYS = ("image_to_text", "text_to_image")
_ROWS = 512  # of a chunk of scores: 50 MB with 25,000 texts


@dataclass(frozen=True)
class ImageText(Task[Any, tuple[str, ...]]):
    """Retrieval between images and texts. A reference is an image's text ids.

    Attributes:
        k: depths of hit.
        ties: see `scoring.image_text`.
        split: of Karpathy's files.
    """

    k: tuple[int, ...] = (1, 5, 10)
    ties: Ties = "pessimistic"
    split: str = "test"

    name: ClassVar[str] = "image_text"
    about: ClassVar[str] = "image-text retrieval both ways: hit@k, mean and median rank; any pool"
    references_are: ClassVar[str] = "COCO captions json, Karpathy json, jsonl {image_id, text_ids}"
    predictions_are: ClassVar[str] = (
        "npz (image_ids, text_ids, and image_embeddings with text_embeddings, or scores of shape texts x images); "
        "jsonl of ranked lists, {image_id, texts} and {text_id, images}"
    )
    num_images: ClassVar[int] = 0  # 0: any
    fold_size: ClassVar[int] = 0  # 0: one pool
    captions_per_image: ClassVar[int] = 0  # 0: all

    def __post_init__(self) -> None:
        check_ks(self.k)
        if self.ties not in get_args(Ties):
            raise ValueError(f"ties is {self.ties!r}; it must be one of {', '.join(get_args(Ties))}")

    def read_references(self, paths: Sequence[Path]) -> dict[str, tuple[str, ...]]:
        found: dict[str, list[str]] = {}
        for path in paths:
            for key, texts in texts_of_images(path, split=self.split):
                found.setdefault(key, []).extend(texts)
        references = {key: tuple(texts) for key, texts in found.items()}
        self.check(references)
        return references

    def references_of(self, items: Iterable[Sample | Pair]) -> dict[str, tuple[str, ...]]:
        """From pairs of a text and its picture's document."""
        found: dict[str, list[str]] = {}
        for item in items:
            if not isinstance(item, Pair) or not item.weight or not item.text:
                continue
            if len(item.gold) != 1:
                raise ValueError(
                    f"text {item.id!r} has {len(item.gold)} right pictures ({named(item.gold) or 'none'}); "
                    f"task {self.name} needs one"
                )
            found.setdefault(item.gold[0], []).append(item.id)
        return {key: tuple(texts) for key, texts in found.items()}

    def check(self, references: Mapping[str, Sequence[str]]) -> None:
        """FileError if these references are not what the protocol is about."""
        _check_texts(references)
        if self.num_images and len(references) != self.num_images:
            raise FileError(
                f"task {self.name} is about {self.num_images} images, and the references have {len(references)}; "
                "use --task image_text for other pools"
            )
        few = [key for key, texts in references.items() if len(texts) < self.captions_per_image]
        if few:
            raise FileError(
                f"task {self.name} needs {self.captions_per_image} captions an image; fewer have {named(few)}"
            )

    def read_predictions(self, path: Path) -> dict[str, Any]:
        """``{"": Similarities}`` of an npz, or lists by "image:ID" and "text:ID"."""
        if path.suffix == ".npz":
            return {"": read_similarities(path)}
        return read_lists(path)

    def ask(self, key: str, reference: tuple[str, ...]) -> Question:
        return Question(key, "", key)

    def score_files(self, predictions: Path, references: Sequence[Path], *, missing: Missing = "zero") -> Scores:
        found = self.read_predictions(predictions)
        return self._score(found, self.read_references(references), missing=missing)

    def score(self, aligned: Aligned[Any, tuple[str, ...]]) -> Scores:
        return self._score({k: v for k, v in aligned.predictions.items() if v is not None}, dict(aligned.references))

    def _score(
        self, found: Mapping[str, Any], references: dict[str, tuple[str, ...]], *, missing: Missing = "zero"
    ) -> Scores:
        num_texts = sum(map(len, references.values()))
        if self.captions_per_image:
            references = {key: texts[: self.captions_per_image] for key, texts in references.items()}
        pool = _Pool(references, fold_size=self.fold_size)
        dropped = num_texts - len(pool.text_ids)
        notes = (
            [f"captions: {dropped} beyond the first {self.captions_per_image} of an image are dropped"]
            if dropped
            else []
        )
        if isinstance(found.get(""), Similarities):
            ranks = _exact_ranks(found[""], pool, ties=self.ties)
            complete = True
            context: dict[str, Any] = {"ties": self.ties}
            notes += _extra(found[""].image_ids, pool.image_ids, "images") + _extra(
                found[""].text_ids, pool.text_ids, "texts"
            )
        else:
            ranks, absent, cut = _list_ranks(found, pool)
            if absent and missing == "refuse":
                raise ValueError(f"{len(absent)} queries have no list: {named(absent)}; missing is refuse")
            if absent and missing == "leave_out":
                raise ValueError(
                    "--missing leave_out would make the pool another one; queries without a list count as 0"
                )
            complete = not absent and not cut
            notes += (
                [f"missing: {len(absent)} queries have no list and count as not found: {named(absent)}"]
                if absent
                else []
            )
            known = {f"image:{key}" for key in pool.image_ids} | {f"text:{key}" for key in pool.text_ids}
            extra = [key for key in found if key not in known]
            notes += [f"extra: {len(extra)} lists are of no query and ignored: {named(extra)}"] if extra else []
            notes += [f"short lists: {cut} do not reach their right item; no mean and median rank"] if cut else []
            context = {"ties": "as listed", "missing": absent, "extra": extra}
        return self._table(ranks, pool, complete=complete, notes=notes, context=context)

    def _table(
        self, ranks: dict[str, Array], pool: _Pool, *, complete: bool, notes: Sequence[str], context: Mapping[str, Any]
    ) -> Scores:
        """Images first, then texts, one row each; NaN: not found."""
        num_images, num_texts = len(pool.image_ids), len(pool.text_ids)
        rows = {"image_to_text": slice(0, num_images), "text_to_image": slice(num_images, None)}
        columns: dict[str, Array] = {"fold": numpy.concatenate([pool.fold_I, pool.fold_I[pool.owner_T]]).astype(float)}
        metrics: list[Metric] = []
        folds_are = f", within folds of {self.fold_size}, averaged over folds" if self.fold_size else ""
        for way in WAYS:
            rank = numpy.full(num_images + num_texts, numpy.nan)
            rank[rows[way]] = ranks[way]
            inside = numpy.zeros(len(rank), dtype=bool)
            inside[rows[way]] = True
            for k in self.k:
                name = f"{way}_hit@{k}"
                columns[name] = numpy.where(inside, (rank <= k).astype(float), numpy.nan)
                metrics.append(mean(name, f"a matching item is among the first {k}{folds_are}"))
            columns[f"{way}_rank"] = rank
            if complete:
                about = f"rank of the first matching item, from 1{folds_are}"
                metrics.append(mean(f"{way}_mean_rank", f"mean {about}", f"{way}_rank"))
                metrics.append(Median(f"{way}_median_rank", f"median {about}", (f"{way}_rank", "fold")))
        return Scores(
            ids=(*(f"image:{key}" for key in pool.image_ids), *(f"text:{key}" for key in pool.text_ids)),
            units=(*pool.image_ids, *(pool.image_ids[owner] for owner in pool.owner_T)),
            columns=columns,
            metrics=tuple(metrics),
            context={
                "k": list(self.k),
                "num_images": num_images,
                "num_texts": num_texts,
                "fold_size": self.fold_size or None,
                "unit": "image with its texts",
                **context,
            },
            notes=tuple(notes),
        )


@dataclass(frozen=True)
class Coco5k(ImageText):
    name: ClassVar[str] = "coco_5k"
    about: ClassVar[str] = "COCO, Karpathy's 5,000 test images, five captions each"
    num_images: ClassVar[int] = 5000
    captions_per_image: ClassVar[int] = 5


@dataclass(frozen=True)
class Coco1k(ImageText):
    name: ClassVar[str] = "coco_1k"
    about: ClassVar[str] = "the same 5,000 as five folds of 1,000, averaged"
    num_images: ClassVar[int] = 5000
    fold_size: ClassVar[int] = 1000
    captions_per_image: ClassVar[int] = 5


@dataclass(frozen=True)
class Flickr30k(ImageText):
    name: ClassVar[str] = "flickr30k_1k"
    about: ClassVar[str] = "Flickr30k, Karpathy's 1,000 test images, five captions each"
    num_images: ClassVar[int] = 1000
    captions_per_image: ClassVar[int] = 5


class _Pool:
    """Images and texts as numbers: who owns which text, and which fold an image is in."""

    def __init__(self, references: Mapping[str, tuple[str, ...]], *, fold_size: int) -> None:
        self.image_ids = tuple(references)
        self.text_ids = tuple(text for texts in references.values() for text in texts)
        self.owner_T = numpy.array([i for i, texts in enumerate(references.values()) for _ in texts], dtype=numpy.int64)
        size = len(self.image_ids)
        self.fold_I = folds(size, size=fold_size) if fold_size else numpy.zeros(size, dtype=numpy.int64)

    def parts(self) -> Iterator[tuple[NDArray[numpy.int64], NDArray[numpy.int64]]]:
        """Images and texts of every fold."""
        for fold in range(int(self.fold_I.max()) + 1):
            yield numpy.flatnonzero(self.fold_I == fold), numpy.flatnonzero(self.fold_I[self.owner_T] == fold)


def _exact_ranks(similarities: Similarities, pool: _Pool, *, ties: Ties) -> dict[str, Array]:
    image_at = _places(similarities.image_ids, pool.image_ids, "images")
    text_at = _places(similarities.text_ids, pool.text_ids, "texts")
    ranks = {"image_to_text": numpy.empty(len(image_at)), "text_to_image": numpy.empty(len(text_at))}
    for images, texts in pool.parts():
        for chunk in (images[i : i + _ROWS] for i in range(0, len(images), _ROWS)):
            scores = similarities.scores(text_at[texts], image_at[chunk]).T
            ranks["image_to_text"][chunk] = ranks_from_scores(scores, chunk, pool.owner_T[texts], ties=ties)
        for chunk in (texts[i : i + _ROWS] for i in range(0, len(texts), _ROWS)):
            scores = similarities.scores(text_at[chunk], image_at[images])
            ranks["text_to_image"][chunk] = ranks_from_scores(scores, pool.owner_T[chunk], images, ties=ties)
    return ranks


def _list_ranks(found: Mapping[str, Any], pool: _Pool) -> tuple[dict[str, Array], list[str], int]:
    """Ranks (NaN: not found), queries without a list, and how many lists end before the right item."""
    ranks = {"image_to_text": numpy.full(len(pool.image_ids), numpy.nan)}
    ranks["text_to_image"] = numpy.full(len(pool.text_ids), numpy.nan)
    absent: list[str] = []
    cut = 0
    for images, texts in pool.parts():
        image_names = [pool.image_ids[i] for i in images]
        text_names = [pool.text_ids[t] for t in texts]
        owned: dict[str, set[str]] = {name: set() for name in image_names}
        for t in texts:
            owned[pool.image_ids[pool.owner_T[t]]].add(pool.text_ids[t])
        sides = (
            ("image_to_text", "image", images, image_names, set(text_names), [owned[name] for name in image_names]),
            (
                "text_to_image",
                "text",
                texts,
                text_names,
                set(image_names),
                [{pool.image_ids[pool.owner_T[t]]} for t in texts],
            ),
        )
        for way, kind, numbers, names, candidates, right in sides:
            for number, name, wanted in zip(numbers, names, right, strict=True):
                listed = found.get(f"{kind}:{name}")
                if listed is None:
                    absent.append(f"{kind}:{name}")
                    continue
                rank = rank_in_list([item for item in listed if item in candidates], wanted)
                cut += rank is None
                ranks[way][number] = numpy.nan if rank is None else rank
    return ranks, absent, cut


def _places(there: Sequence[str], wanted: Sequence[str], what: str) -> NDArray[numpy.int64]:
    """Where the wanted ids are; a pool with holes would be an easier one, so none may be absent."""
    place = {key: i for i, key in enumerate(there)}
    absent = [key for key in wanted if key not in place]
    if absent:
        raise FileError(
            f"{len(absent)} of {len(wanted)} {what} of the references are not in the predictions: {named(absent)}"
        )
    return numpy.array([place[key] for key in wanted], dtype=numpy.int64)


def _extra(there: Sequence[str], wanted: Sequence[str], what: str) -> list[str]:
    extra = sorted(set(there) - set(wanted))
    return [f"extra: {len(extra)} {what} are not in the references and ignored: {named(extra)}"] if extra else []


def _check_texts(references: Mapping[str, Sequence[str]]) -> None:
    owner: dict[str, str] = {}
    for image, texts in references.items():
        for text in texts:
            if text in owner:
                raise FileError(
                    f"text {text!r} belongs to image {owner[text]!r} and to {image!r}; text ids must differ"
                )
            owner[text] = image
