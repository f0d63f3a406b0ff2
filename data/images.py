"""Pictures: from encoded bytes to a small square of pixels, one way for every caller.

Emoji are drawn on a transparent canvas with margins that differ between fonts, so the fully transparent
border is trimmed before the picture is resized: the two renderings of one flag then line up, at the cost of
its aspect ratio. Transparency is composited on white. Nothing larger than ``MAX_PIXELS`` or ``MAX_BYTES`` is decoded.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence

import numpy
import torch
from PIL import Image, UnidentifiedImageError

from data import transforms
from data.image_formats import FORMATS, MAX_BYTES, MAX_PIXELS, Unread

# Public transforms bring the shorter side to their size, and would make terabytes of a line of pixels.
MAX_PROPORTION = 200


def decode(png: bytes, size: int, *, transform: str = transforms.SQUARE) -> torch.Tensor:
    """Decode to uint8 RGB of shape (3, size, size); ValueError says what is wrong with the bytes.

    The result is the caller's own: writing to it does not disturb the cache.
    """
    array = _decode(png, size, transform)
    return torch.from_numpy(array.copy())


@functools.lru_cache(maxsize=8192)
def _decode(png: bytes, size: int, transform: str) -> numpy.ndarray:
    if size < 1:
        raise ValueError(f"image size is {size}; it must be at least 1")
    image = load_rgba(png)
    box = image.getchannel("A").getbbox()
    if box is not None and transform == transforms.SQUARE:
        image = image.crop(box)
    if transform != transforms.SQUARE and max(image.size) > MAX_PROPORTION * min(image.size):
        raise ImageError(f"proportions beyond {MAX_PROPORTION} to 1", f"{image.width} x {image.height} pixels")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    flat = Image.alpha_composite(white, image).convert("RGB")
    if transform != transforms.SQUARE:
        return transforms.transform(transform, size)(flat)
    # Averaging over areas is the right antialias when shrinking; it makes blocks of a picture that grows.
    shrinks = flat.width >= size and flat.height >= size
    flat = flat.resize((size, size), Image.Resampling.BOX if shrinks else Image.Resampling.BILINEAR)
    return numpy.ascontiguousarray(numpy.asarray(flat, dtype=numpy.uint8).transpose(2, 0, 1))


class ImageError(ValueError):
    """A picture that cannot be decoded.

    Attributes:
        reason: what is wrong, without the particulars of this picture, so that it can be counted.
    """

    def __init__(self, reason: str, particulars: str) -> None:
        super().__init__(reason, particulars)
        self.reason = reason

    def __str__(self) -> str:
        return "{} ({})".format(*self.args)


def load_rgba(data: bytes) -> Image.Image:
    """Decode a picture as RGBA; ImageError if it is broken or has more than MAX_PIXELS pixels or MAX_BYTES bytes."""
    if isinstance(data, Unread):
        raise ImageError(data.reason, "no bytes")
    if len(data) > MAX_BYTES:
        raise ImageError(f"more than {MAX_BYTES >> 20} MiB", f"{len(data)} bytes")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height <= MAX_PIXELS:
                return image.convert("RGBA")
            size = f"{image.width} x {image.height} pixels"
    except UnidentifiedImageError:
        raise ImageError("not an image", f"{len(data)} bytes") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(f"more than {MAX_PIXELS} pixels", str(error)) from error
    except Exception as error:  # Pillow promises no type: damaged files give struct.error, IndexError, zlib.error, ...
        raise ImageError("undecodable image", f"{len(data)} bytes: {error}") from error
    raise ImageError(f"more than {MAX_PIXELS} pixels", size)


def pixels(images: Sequence[bytes], *, side: int = 12) -> torch.Tensor:
    """The baseline features (len(images), 3 * side * side): raw pixels, mean-centred, of unit length."""
    if not images:
        return torch.zeros(0, 3 * side * side)
    flat = torch.stack([decode(png, side).flatten() for png in images]).float() / 255
    return torch.nn.functional.normalize(flat - flat.mean(dim=1, keepdim=True), dim=1)
