"""Ids as the names of tar members, and back.

A sample's id is whatever its source calls it (``10.1000/xyz``, ``Q42#3``, a URL); the key of a tar member is the path
up to the first dot, and slashes are folders. So what would be misread is written ``%XX``, as in URLs, and read back:
an id keeps its form in `Dataset` and `DocumentStore`, its key is a name that any tar tool can handle. Ids of letters,
digits, hyphens and the like, such as the factbook's, are their own keys.
"""

from __future__ import annotations

import re

_UNSAFE = re.compile(r"[%./\\\x00-\x1f\x7f]")
_ESCAPED = re.compile(r"%([0-9A-F]{2})")
MAX_LENGTH = 1000  # bytes of a key; tars can hold longer names, but a longer id is a text in the wrong column


def to_key(sample_id: str) -> str:
    """The key of a sample; ValueError if the id is empty, too long or not encodable."""
    if not sample_id:
        raise ValueError("an id is empty")
    key = _UNSAFE.sub(lambda match: f"%{ord(match[0]):02X}", sample_id)
    try:
        length = len(key.encode("utf-8"))
    except UnicodeEncodeError:
        raise ValueError(f"id {sample_id!r} holds half a character (a lone surrogate)") from None
    if length > MAX_LENGTH:
        raise ValueError(f"id {sample_id[:60]!r}... has {length} bytes; at most {MAX_LENGTH} are allowed")
    return key


def from_key(key: str) -> str:
    """The id of the sample with this key."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), key) if "%" in key else key
