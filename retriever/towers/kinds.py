"""Kinds of towers by name; ``package.module:Class`` names one of anybody's own."""

from __future__ import annotations

import importlib

from retriever.config import NO_TOWER, RetrieverConfig
from retriever.towers.interface import ImageBackend, TextBackend

# Modules of public models are imported only where such a model is asked for.
_TEXT = {
    "trigrams": "retriever.towers.trigram_bag:TrigramText",
    "transformers": "retriever.towers.transformers_text:TransformersText",
    "open_clip": "retriever.towers.clip:ClipText",
}
_IMAGE = {
    "small": "retriever.towers.small_convolutions:SmallImage",
    "timm": "retriever.towers.timm_image:TimmImage",
    "open_clip": "retriever.towers.clip:ClipImage",
}


def text_backend(config: RetrieverConfig) -> TextBackend | None:
    """The kind that ``retriever.text`` names, None for ``none``.

    Raises:
        ValueError: if there is none of that name, or what it needs is not there.
    """
    if config.text == NO_TOWER:
        return None
    kind: type[TextBackend] = _find("text", config.text, _TEXT, TextBackend)
    return kind(config)


def image_backend(config: RetrieverConfig, image_size: int) -> ImageBackend | None:
    """The kind that ``retriever.image`` names, None for ``none``; raises as `text_backend` does."""
    if config.image == NO_TOWER:
        return None
    kind: type[ImageBackend] = _find("image", config.image, _IMAGE, ImageBackend)
    return kind(config, image_size)


def _find(field: str, name: str, known: dict[str, str], base: type) -> type:
    module, _, attribute = known.get(name, name).partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"retriever.{field} is {name!r}, which cannot be imported: {error}") from None
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"retriever.{field} is {name!r}, which is no subclass of {base.__module__}.{base.__name__}")
    return found
