"""From the bytes of a sample's members to values, one decoder an extension; what is wrong comes back as a reason.

Shards come from anywhere, so bytes are believed to be nothing until a decoder has looked at them: text must be UTF-8,
JSON must not nest without end or hold half characters that no tokenizer can encode, pictures have a limit on bytes and
on pixels before anything is decoded. Pickles are not decoded by anybody: reading one runs whatever code its author
wrote. Reasons are few and name no sample, so that they can be counted (`data.bad_data`).

An extension is taken from its end: ``seg.png`` is a ``png``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from data.image_formats import EXTENSIONS
from data.image_formats import MAX_BYTES as MAX_IMAGE_BYTES
from data.shard_set import RawSample

MAX_TEXT_BYTES = 16 << 20
PICKLES = frozenset({"pkl", "pickle", "pyd", "pth", "pt", "ten", "joblib"})  # those that webdataset would unpickle, too


class UndecodableError(ValueError):
    """A member is not what its extension says; the message is a reason that can be counted."""


@dataclass(frozen=True)
class DecodedSample:
    """A sample's values.

    Attributes:
        key: as in its shard.
        values: extension -> value; empty if the sample has a problem.
        problem: why it cannot be used, or None.
    """

    key: str
    values: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None


def decode(sample: RawSample, wanted: Collection[str] | None = None) -> DecodedSample:
    """Decode the ``wanted`` members of a sample (default: all), each of which must be there; never raises."""
    if sample.problem is not None:
        return DecodedSample(sample.key, problem=sample.problem)
    values: dict[str, Any] = {}
    for extension in sample.members if wanted is None else wanted:
        if extension not in sample.members:
            return DecodedSample(sample.key, problem=f"missing member {extension}")
        try:
            values[extension] = decode_member(extension, sample.members[extension])
        except UndecodableError as error:
            return DecodedSample(sample.key, problem=str(error))
    return DecodedSample(sample.key, values)


def decode_member(extension: str, data: bytes) -> Any:
    """The value of one member; UndecodableError if there is none.

    ``txt`` gives str, ``json`` what JSON holds, ``cls`` int, pictures a ``PIL.Image.Image`` in RGBA.
    """
    kind = extension.rpartition(".")[2]
    if kind in PICKLES:
        raise UndecodableError(f"{kind}: pickles are never read")
    if kind not in DECODERS:
        raise UndecodableError(f"{kind}: no decoder")
    limit = MAX_IMAGE_BYTES if DECODERS[kind] is decode_image else MAX_TEXT_BYTES
    if len(data) > limit:
        raise UndecodableError(f"{kind}: more than {limit >> 20} MiB")
    try:
        return DECODERS[kind](data)
    except ValueError as error:
        raise UndecodableError(f"{kind}: {error}") from error


def decode_text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None


def decode_json(data: bytes) -> Any:
    """What JSON holds; ValueError if it is malformed, nests too deeply or cannot be written as UTF-8 again."""
    text = decode_text(data).removeprefix("\ufeff")
    try:
        value = json.loads(text)
        if "\\u" in text:  # "\\ud800" is valid JSON and no text
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nests too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("half a surrogate pair") from None
    except ValueError:
        raise ValueError("malformed") from None
    return value


def decode_class(data: bytes) -> int:
    text = decode_text(data[:32]).strip()
    if len(data) > 32 or not text.removeprefix("-").isdecimal():
        raise ValueError("not a number")
    return int(text)


def decode_image(data: bytes) -> Any:
    from data import images  # with torch, which takes seconds to import, and converters decode nothing with it

    try:
        return images.load_rgba(data)
    except images.ImageError as error:
        raise ValueError(error.reason) from error


DECODERS: dict[str, Callable[[bytes], Any]] = {
    "txt": decode_text, "json": decode_json, "cls": decode_class, **dict.fromkeys(EXTENSIONS, decode_image),
}  # fmt: skip
