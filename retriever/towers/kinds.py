"""Kinds of towers by name; ``package.module:Class`` names one of anybody's own."""

from __future__ import annotations

import difflib
import importlib

from retriever.config import NO_TOWER, RetrieverConfig
from retriever.towers.interface import ImageBackend, TextBackend

_TEXT = {
    "trigrams": "retriever.towers.trigram_bag:TrigramText",
}
_IMAGE = {
    "small": "retriever.towers.small_convolutions:SmallImage",
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
    if ":" not in name and name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"retriever.{field} is {name!r}; {hint}allowed: {', '.join(known)}, {NO_TOWER}, or package.module:Class"
        )
    module, _, attribute = known.get(name, name).partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"retriever.{field} is {name!r}, which cannot be imported: {error}") from None
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"retriever.{field} is {name!r}, which is no subclass of {base.__module__}.{base.__name__}")
    return found
