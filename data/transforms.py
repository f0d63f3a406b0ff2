"""How a picture comes to a square, as a public model's preprocessing has it, by name.

``square`` is this project's own (`data.images`): the transparent border is trimmed and the rest resized, whatever its
proportions. ``open_clip:MODEL`` or ``open_clip:MODEL:PRETRAINED`` and ``torchvision:WEIGHTS`` take size, interpolation
and cropping from the libraries' own transforms, at ``data.image_size`` in place of their size. Pictures stay in [0, 1]:
mean and deviation belong to the model that reads them, and augmentation comes between.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable

import numpy
from PIL import Image

SQUARE = "square"
Transform = Callable[[Image.Image], numpy.ndarray]


def check(name: str) -> None:
    """Whether a transform of that name exists.

    Raises:
        ValueError: says what is allowed.
    """
    if name != SQUARE:
        transform(name, 32)


@functools.lru_cache(maxsize=8)
def transform(name: str, size: int) -> Transform:
    """From an RGB picture to uint8 (3, size, size); not for `SQUARE`, which needs the picture's transparency.

    Raises:
        ValueError: no transform is called so.
    """
    library, _, what = name.partition(":")
    if library == "open_clip" and what:
        return _open_clip(what, size)
    if library == "torchvision" and what:
        return _torchvision(what, size)
    raise ValueError(
        f"data.image_transform is {name!r}; allowed are square, open_clip:MODEL, open_clip:MODEL:PRETRAINED and "
        "torchvision:WEIGHTS (such as torchvision:ResNet50_Weights.IMAGENET1K_V2)"
    )


def _open_clip(what: str, size: int) -> Transform:
    import open_clip
    from open_clip.transform import PreprocessCfg, image_transform_v2

    model, _, tag = what.partition(":")
    if model not in open_clip.list_models():
        raise ValueError(_unknown(f"open_clip:{what}", "model", model, open_clip.list_models()))
    tags = open_clip.list_pretrained_tags_by_model(model)
    if tag and tag not in tags:
        raise ValueError(_unknown(f"open_clip:{what}", "pretrained tag", tag, tags))
    given = open_clip.get_pretrained_cfg(model, tag) if tag else {}
    how = {key: given[key] for key in ("interpolation", "resize_mode") if key in given}
    *steps, normalise = image_transform_v2(PreprocessCfg(size=size, **how), is_train=False).transforms
    assert type(normalise).__name__ == "Normalize"

    def apply(image: Image.Image) -> numpy.ndarray:
        value = image
        for step in steps:
            value = step(value)
        return _bytes(value)

    return apply


def _torchvision(what: str, size: int) -> Transform:
    import torchvision
    from torchvision.transforms._presets import ImageClassification

    try:
        preset = torchvision.models.get_weight(what).transforms()
    except (ValueError, KeyError, AttributeError):
        names = [str(weights) for model in torchvision.models.list_models(module=torchvision.models)
                 for weights in torchvision.models.get_model_weights(model)]  # fmt: skip
        raise ValueError(_unknown(f"torchvision:{what}", "weights", what, names)) from None
    if not isinstance(preset, ImageClassification):
        raise ValueError(f"data.image_transform is 'torchvision:{what}', whose transform is not one of single pictures")
    resized = round(size * preset.resize_size[0] / preset.crop_size[0])
    whole = ImageClassification(
        crop_size=size, resize_size=resized, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0),
        interpolation=preset.interpolation, antialias=preset.antialias,
    )  # fmt: skip
    return lambda image: _bytes(whole(image))


def _bytes(image_3SS: object) -> numpy.ndarray:
    """Float in [0, 1], as the libraries make it of bytes, to those bytes."""
    return (numpy.asarray(image_3SS) * 255).round().astype(numpy.uint8)


def _unknown(name: str, kind: str, value: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(value, known, n=1, cutoff=0.3)
    there = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known) or 'none'}"
    return f"data.image_transform is {name!r}, but there is no {kind} {value!r}; {there}"
