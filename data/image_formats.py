"""How an encoded picture is told by its first bytes, which member of a sample is the picture, and one left unread.

Pictures are stored as they came (a JPEG stays the JPEG it was); the name of the member says what it is, so that
other tools open the shards as well. What the name says and what the bytes are must therefore agree, and the bytes
decide.
"""

from __future__ import annotations

from collections.abc import Mapping

MAX_PIXELS = 4096 * 4096  # larger pictures are not decoded
MAX_BYTES = 64 << 20  # nor are those of more bytes
# Some of Pillow's others call programs (EPS: Ghostscript) or are hardly ever used.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")

# Extension of the member -> what the bytes begin with (at offset 0; WebP and the ISO formats carry more behind).
SIGNATURES: dict[str, tuple[bytes, ...]] = {
    "jpg": (b"\xff\xd8\xff",),
    "png": (b"\x89PNG\r\n\x1a\n",),
    "gif": (b"GIF87a", b"GIF89a"),
    "bmp": (b"BM",),
    "tiff": (b"II*\x00", b"MM\x00*"),
}
# Extensions under which a picture may be found, the usual ones first.
EXTENSIONS = ("png", "jpg", "jpeg", "webp", "gif", "bmp", "tiff", "tif")


class Unread(bytes):
    """A picture that is there, and whose bytes are not: nobody here wanted them, or they could not be read.

    Who decodes it all the same is told ``reason``, as for a broken picture.
    """

    reason: str

    def __new__(cls, reason: str = "a picture that was not read") -> Unread:
        self = super().__new__(cls)
        self.reason = reason
        return self


def to_store(picture: bytes) -> bytes:
    """The bytes of a picture that is about to be stored; ValueError if they were not read."""
    if isinstance(picture, Unread):
        raise ValueError("a picture that was not read cannot be stored; read its sample or document with pictures")
    return picture


def extension_of(data: bytes) -> str | None:
    """The extension that the bytes of an encoded picture call for; None if they are no picture of a known format."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    for extension, signatures in SIGNATURES.items():
        if data.startswith(signatures):
            return extension
    return None


def picture_member(members: Mapping[str, bytes]) -> bytes | None:
    """The encoded picture among the members of a sample, by extension; None if there is none."""
    return next((members[extension] for extension in EXTENSIONS if extension in members), None)
