"""Zero-shot classification: an embedding a class from prompt templates, and where the right class stands.

A class is the mean of its prompts' normalised embeddings, normalised again (CLIP, 2103.00020): the mean without the
second normalisation would favour classes whose prompts agree with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy
from numpy.typing import NDArray

Embeddings = NDArray[numpy.floating]

TEMPLATES = ("a photo of a {}.",)


def prompts(name: str, templates: Sequence[str] = TEMPLATES) -> list[str]:
    """A class name in every template.

    Raises:
        ValueError: if a template has no place for the name, or something else in braces.
    """
    for template in templates:
        if template.count("{}") != 1 or template.count("{") != 1 or template.count("}") != 1:
            raise ValueError(
                f"template {template!r} must hold {{}} once, where the class name goes, and no other brace"
            )
    return [template.replace("{}", name) for template in templates]


def class_embeddings(
    encode: Callable[[Sequence[str]], Embeddings], names: Sequence[str], templates: Sequence[str] = TEMPLATES
) -> Embeddings:
    """One unit vector a class, shape (C, D).

    Args:
        encode: from T texts to embeddings of shape (T, D), of any length but zero.
    """
    rows = [_unit(_unit(encode(prompts(name, templates))).mean(axis=0)) for name in names]
    return numpy.stack(rows)


def rank_of_label(scores_NC: Embeddings, label_N: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
    """Rank, from 1, of the right class; classes with the same score stand before it (pessimistic)."""
    right = numpy.take_along_axis(scores_NC, label_N[:, None], axis=1)
    return (scores_NC >= right).sum(axis=1)


def _unit(vectors: Embeddings) -> Embeddings:
    return vectors / numpy.linalg.norm(vectors, axis=-1, keepdims=True)
