"""From the bytes of documents to documents, whole or damaged: json and picture apart, parsed, and what cannot be.

A document is kept as it was read (`Entry`), because parsed it would weigh several times that, and on every garbage
collection. For a damaged one stands one that is empty and says why, without particulars, so that it can be counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy
from numpy.typing import NDArray

from data.document import Document, from_members, line_members, problem_of
from data.document_table import NO_PICTURE
from data.image_formats import Unread
from data.random_reads import RandomReads

UNREAD = -2  # as the size of a picture that is not read; -1 is one in the log
Entry = bytes | tuple[bytes, bytes]  # a document as it was read: its json, and its picture if it has one


def read_parts(
    reads: RandomReads, ids: Sequence[str], ranges: NDArray[numpy.int64], problems: dict[str, str] | None
) -> list[bytes | None]:
    """The bytes of each document; of one that cannot be read None.

    Args:
        problems: is told why, by id. None: it is raised.
    """
    try:
        return list(reads.read(ranges))
    except (OSError, ValueError):  # one bad shard must not cost the whole batch: find out which
        if problems is None:
            raise
    parts: list[bytes | None] = []
    for document_id, one in zip(ids, ranges, strict=True):
        try:
            parts += reads.read(one[None])
        except ValueError:
            parts.append(None)
            problems[document_id] = "the shard has become shorter"
        except OSError as error:
            parts.append(None)
            problems[document_id] = f"unreadable shard: {error.strerror or type(error).__name__}"
    return parts


def parse(entries: Mapping[str, Entry], problems: dict[str, str] | None) -> dict[str, Document]:
    """Documents by id; those in ``problems``, and those that hold none, have neither text nor picture.

    Args:
        problems: is told why, by id. None: it is raised, as a ValueError.
    """
    found = {name: damaged_document(name, problem) for name, problem in (problems or {}).items()}
    for document_id, entry in entries.items():
        body, image = entry if isinstance(entry, tuple) else (entry, None)
        try:
            found[document_id] = from_members(document_id, body, image)
        except ValueError:
            if problems is None:
                raise
            problems[document_id] = problem_of(body)
            found[document_id] = damaged_document(document_id, problems[document_id])
    return found


def damaged_document(document_id: str, problem: str) -> Document:
    """What stands for a document that cannot be read."""
    return Document(document_id, "", {}, problem=problem)


def leave_pictures(unwanted: Sequence[bool], ranges: NDArray[numpy.int64], extents: NDArray[numpy.int64]) -> None:
    """Shorten the ranges (N, 3) and extents (N, 5) of documents whose picture is unwanted to their json, in place.

    Those in the log are one line, and read whole.
    """
    rows = numpy.array(unwanted, bool) & (extents[:, 4] >= 0) & (extents[:, 4] != NO_PICTURE)
    ranges[rows, 1] += extents[rows, 1]
    ranges[rows, 2] = ranges[rows, 1] + extents[rows, 2]
    extents[rows, 4] = UNREAD


def entries_of(parts: Sequence[bytes | None], extents: NDArray[numpy.int64]) -> Sequence[Entry | None]:
    """What is kept of each document: its json, with its picture if it has one, wherever it stands."""
    if (extents[:, 4] == NO_PICTURE).all():
        return parts
    entries: list[Entry | None] = []
    for part, (_, start, size, image_start, image_size) in zip(parts, extents.tolist(), strict=True):
        if part is None or image_size == NO_PICTURE:
            entries.append(part)
        elif image_size == UNREAD:
            entries.append((part, Unread()))
        elif image_size < 0:
            entries.append(line_members(part))
        else:
            entries.append((part[start : start + size], part[image_start : image_start + image_size]))
    return entries


def is_partial(entry: Entry) -> bool:
    """Whether a document has a picture that was not read."""
    return type(entry) is tuple and type(entry[1]) is Unread


def num_bytes(entry: Entry) -> int:
    return len(entry) if isinstance(entry, bytes) else len(entry[0]) + len(entry[1])
