"""Files of image-text retrieval: embeddings, scores, ranked lists, and which texts belong to which image."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from rag_mm.evaluate.prediction_files import FileError, Record, by_id, is_jsonl, read_json, read_jsonl, shown
from rag_mm.evaluate.tasks.captions import karpathy_id, karpathy_images


@dataclass(frozen=True)
class Similarities:
    """Scores of all texts (rows) and images (columns), from a matrix or as products of embeddings."""

    image_ids: tuple[str, ...]
    text_ids: tuple[str, ...]
    images: NDArray[numpy.floating] = field(repr=False)
    texts: NDArray[numpy.floating] | None = field(repr=False)  # None: ``images`` is the matrix, shape (T, I)

    def scores(self, texts: NDArray[numpy.int64], images: NDArray[numpy.int64]) -> NDArray[numpy.floating]:
        """Of some texts (rows) with some images (columns)."""
        if self.texts is None:
            return self.images[numpy.ix_(texts, images)]
        return self.texts[texts] @ self.images[images].T


def read_lists(path: Path) -> dict[str, tuple[str, ...]]:
    """Ranked ids by query, which is called "image:ID" or "text:ID"."""
    return by_id((_list(record) for record in read_jsonl(path)), what="predictions")


def texts_of_images(path: Path, *, split: str) -> Iterator[tuple[str, list[str]]]:
    """Image and text ids: once an image of Karpathy's files and jsonl, once a caption of COCO's."""
    if is_jsonl(path):
        for record in read_jsonl(path):
            name, value = record.get("text_ids", "texts")
            if not isinstance(value, list) or not value:
                record.fail(f"field {name} is {shown(value)}; it must be a list of text ids, at least one")
            yield record.id("image_id", "id"), [record.identifier(name, text) for text in value]
        return
    file = read_json(path)
    if "annotations" in file.records:
        for record in file.records["annotations"]:
            yield record.id("image_id"), [record.id("id")]
        return
    for record in karpathy_images(file.array("images", ""), split=split):
        yield karpathy_id(record), [sentence.id("sentid") for sentence in record.objects("sentences")]


def _list(record: Record) -> tuple[str, Record, tuple[str, ...]]:
    side, field_name = ("image", "texts") if record.has("image_id") else ("text", "images")
    key = f"{side}:{record.id('image_id', 'text_id')}"
    name, value = record.get(field_name)
    if not isinstance(value, list):
        record.fail(f"field {name} is {shown(value)}; it must be a list of ids, best first")
    items = tuple(record.identifier(name, item) for item in value)
    if len(set(items)) < len(items):
        record.fail(f"field {name} names an id twice")
    return key, record, items


def read_similarities(path: Path) -> Similarities:
    """Embeddings or scores of an npz file, checked: names, shapes, no NaN, no pickle."""
    try:
        with numpy.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise FileError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be read as npz without pickles: {error}") from None
    for name in ("image_ids", "text_ids"):
        if name not in arrays:
            raise FileError(f"{path}: array {name} is missing; the arrays there are: {', '.join(arrays) or 'none'}")
    ids = {name: tuple(str(key).strip() for key in arrays[name].tolist()) for name in ("image_ids", "text_ids")}
    for name, keys in ids.items():
        if len(set(keys)) < len(keys):
            raise FileError(f"{path}: array {name} names an id twice")
    num_images, num_texts = len(ids["image_ids"]), len(ids["text_ids"])
    if "scores" in arrays:
        _check_shape(path, "scores", arrays["scores"], (num_texts, num_images))
        return Similarities(ids["image_ids"], ids["text_ids"], arrays["scores"], None)
    for name in ("image_embeddings", "text_embeddings"):
        if name not in arrays:
            raise FileError(f"{path}: array {name} is missing (or scores); the arrays there are: {', '.join(arrays)}")
    images, texts = arrays["image_embeddings"], arrays["text_embeddings"]
    width = images.shape[-1] if images.ndim else 0
    _check_shape(path, "image_embeddings", images, (num_images, width))
    _check_shape(path, "text_embeddings", texts, (num_texts, width))
    return Similarities(ids["image_ids"], ids["text_ids"], images, texts)


def _check_shape(path: Path, name: str, array: NDArray[Any], shape: tuple[int, int]) -> None:
    if array.shape != shape or not numpy.issubdtype(array.dtype, numpy.floating):
        raise FileError(
            f"{path}: array {name} is {array.dtype} of shape {array.shape}; it must be float of shape {shape}"
        )
    if not numpy.isfinite(array).all():
        row = int(numpy.argwhere(~numpy.isfinite(array))[0][0])
        raise FileError(f"{path}: array {name} holds a NaN or infinity in row {row}")
