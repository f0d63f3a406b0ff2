"""A document: what the retriever finds and the reader reads; and how it is stored as a sample of a shard."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from data.decoding import UndecodableError, decode_member
from data.image_formats import extension_of, to_store
from data.sample_ids import to_key

_scan: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Document:
    """One entry of the memory.

    Attributes:
        id: unique in its store.
        title: one line; may be empty.
        fields: label -> value, in the order they are written out; one line each.
        image: picture as it was encoded (PNG, JPEG, ...), or None; `data.image_formats.Unread` where it was not read.
        passage: running text of any number of lines, or empty.
        meta: whatever else the converter kept; never shown to a model.
        problem: why it is empty, of a document that is damaged in its store; else None.
    """

    id: str
    title: str
    fields: dict[str, str]
    image: bytes | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    passage: str = ""
    problem: str | None = None

    def __post_init__(self) -> None:
        try:  # all at once: this runs for every document that is read
            labels = "".join(self.fields)
            if "\n" not in "".join((self.title, labels, *self.fields.values())) and ":" not in labels:
                return
        except TypeError:
            pass
        for name, value in (("title", self.title), *self.fields.items()):
            if not isinstance(value, str) or "\n" in value or "\n" in name or ":" in name:
                raise ValueError(f"document {self.id!r}: {name!r} must be one line of text, is {value!r}")

    @property
    def text(self) -> str:
        """What a model reads: the title, then ``label: value``, then the passage, every line ended by a newline."""
        passage = f"{self.passage}\n" if self.passage else ""
        lines = [f"{self.title}\n", *(f"{label}: {value}\n" for label, value in self.fields.items())]
        return "".join([*lines, passage])

    @property
    def search_text(self) -> str:
        """What the retriever embeds: the title and, where there is one, the passage (fields change, and stay out)."""
        return f"{self.title}\n{self.passage}" if self.passage else self.title


def to_sample(document: Document) -> tuple[str, dict[str, bytes]]:
    """The shard sample that holds ``document``."""
    members = {"json": json.dumps(_body(document), ensure_ascii=False).encode()}
    if document.image is not None:
        members[extension_of(document.image) or "png"] = to_store(document.image)
    return to_key(document.id), members


def from_members(document_id: str, body: bytes, image: bytes | None) -> Document:
    """The document from its member ``json`` and its picture.

    Raises:
        ValueError: the members hold no document.
    """
    try:
        try:  # json.loads in two thirds of its time, for what to_sample writes: UTF-8 without space around
            text = body.decode()
            value, end = _scan(text, 0)
            if end != len(text):
                value = json.loads(body)
            if "\\u" in text:  # "\\ud800" is valid JSON and no text
                json.dumps(value, ensure_ascii=False).encode()
        except (StopIteration, ValueError):
            value = json.loads(body)
            json.dumps(value, ensure_ascii=False).encode()
        passage = value.get("passage", "")
        if not isinstance(passage, str):
            raise TypeError(f"passage must be text, is {passage!r}")
        document = object.__new__(Document)  # as unpickling does: half the time of a frozen dataclass's __init__
        document.__dict__.update(
            id=document_id, title=value["title"], fields=value["fields"], image=image, meta=value.get("meta", {}),
            passage=passage,
        )  # fmt: skip
        document.__post_init__()
        return document
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"document {document_id!r} is malformed: {error}") from error


def problem_of(body: bytes) -> str:
    """Why `from_members` finds no document in a member ``json``, without particulars, so that it can be counted."""
    try:
        decode_member("json", body)
    except UndecodableError as error:
        return str(error)
    return "json: not a document's"


def to_entry(document: Document) -> dict[str, Any]:
    """The document as one JSON object, picture included; the object is a member ``json``, too."""
    image = None if document.image is None else base64.b64encode(to_store(document.image)).decode()
    return {"id": document.id, **_body(document), "image": image}


def line_members(line: bytes) -> bytes | tuple[bytes, bytes]:
    """The member ``json`` of a document that `to_entry` made an object of, and its picture if it has one."""
    image = json.loads(line).get("image")
    return line if image is None else (line, base64.b64decode(image, validate=True))


def _body(document: Document) -> dict[str, Any]:
    body: dict[str, Any] = {"title": document.title, "fields": document.fields, "meta": document.meta}
    if document.passage:
        body["passage"] = document.passage
    return body
