"""Users' pictures: found in a folder, looked at, and passed on byte for byte.

A picture that is missing or broken does not stop a conversion of a million others; it is counted, and too many stop
it. Looking means decoding: JPEGs at an eighth of their size (``draft``), which reads all their data and costs a
fraction of the time.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from data.formats import stamps
from data.image_formats import FORMATS, MAX_BYTES, MAX_PIXELS, extension_of


@dataclass(frozen=True)
class BadPicture:
    """Why there is no picture; ``reason`` is what it is counted under, ``detail`` names it."""

    reason: str
    detail: str


def check(data: bytes, name: str) -> bytes | BadPicture:
    """The bytes, if they are a whole picture of a known format and a bearable size."""
    if len(data) > MAX_BYTES:
        return BadPicture("picture too large", f"{name} has {len(data)} bytes, more than {MAX_BYTES}")
    if extension_of(data) is None:
        return BadPicture("not a picture", f"{name} is no picture of a known format ({len(data)} bytes)")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    size = f"{image.width} x {image.height}"
                    return BadPicture("picture too large", f"{name} has {size} pixels, more than {MAX_PIXELS}")
                image.draft("RGB", (64, 64))
                image.load()
    except Exception as error:  # decoders raise whatever they like on bytes that others chose
        return BadPicture("broken picture", f"{name} cannot be decoded: {' '.join(str(error).split())[:120]}")
    return data


def read(folder: Path, name: str) -> bytes | BadPicture:
    """A picture of a folder by its name there, which must not lead out of it."""
    path = folder / name
    stamps.note(path)
    if name.startswith("/") or ".." in Path(name).parts:
        return BadPicture("picture outside of its folder", f"{name!r} leads out of {folder}")
    try:
        if path.stat().st_size > MAX_BYTES:
            return BadPicture("picture too large", f"{path} is larger than {MAX_BYTES} bytes")
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return BadPicture("missing picture", f"{path} does not exist")
    except (OSError, ValueError) as error:
        return BadPicture("unreadable picture", f"{path} cannot be read: {error}")
    return check(data, str(path))
