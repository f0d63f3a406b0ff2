"""The edit log of a document store: what changed since the shards were written, one line a change, only appended to.

    {"op": "edit", "id": "np", "field": "capital", "value": "Pokhara", "base": "0f3a..."}
    {"op": "add", "id": "xk", "title": "Kosovo", "fields": {...}, "meta": {...}, "image": BASE64 or null, "base": ...}
    {"op": "delete", "id": "an", "base": ...}

The number of the line is the number of the edit; the store after edit n is what the first n lines make of the shards,
so a run can name what it read, and read it again after later edits. ``base`` begins the fingerprint of those shards: a
log that was copied beside others is refused. A line is written whole, under a lock and onto the disk, before anybody
is told that it happened; one without its newline never did, and is cut off by the next writer.

Held in memory are the ids of all edits, the fields that were set and where in the log added documents stand, not
these documents. At the point where that hurts, a store wants to be written anew.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from data.folder import Folder

EDITS = "edits.jsonl"


class EditLog:
    """The log, taken in up to some edit.

    Attributes:
        ids: the document that each edit is about.
        changed: fields that were set, by document.
        added: documents that the log holds -> first byte and end of their line.
        deleted: documents that are gone -> number of the edit that deleted them.
        hidden: documents of the shards that are gone, or were added anew.
        end: bytes of the log taken in so far.
        at_edit: the edit it stops at, or None for the last.
    """

    def __init__(
        self, folder: Folder, *, base: str, in_shards: Callable[[str], bool], at_edit: int | None = None
    ) -> None:
        """Read the log.

        Args:
            base: fingerprint of the shards.
            in_shards: whether they hold a document.

        Raises:
            ValueError: the log is malformed, or of other shards, or has fewer than ``at_edit`` edits.
        """
        if at_edit is not None and at_edit < 0:
            raise ValueError(f"at_edit is {at_edit}; it must be at least 0")
        self.folder, self.base, self.at_edit = folder, base[:12], at_edit
        self.ids: list[str] = []
        self.changed: dict[str, dict[str, str]] = {}
        self.added: dict[str, tuple[int, int]] = {}
        self.deleted: dict[str, int] = {}
        self.hidden: set[str] = set()
        self.end = 0
        self._in_shards = in_shards
        self.refresh()
        if at_edit is not None and len(self) < at_edit:
            raise ValueError(f"at_edit is {at_edit}; {self.path} has {len(self)} edits")

    def __len__(self) -> int:
        """Number of edits taken in."""
        return len(self.ids)

    @property
    def path(self) -> str:
        return self.folder.path(EDITS)

    def holds(self, document_id: str) -> bool:
        """Whether there is such a document after the last edit taken in."""
        if document_id in self.added:
            return True
        return document_id not in self.deleted and self._in_shards(document_id)

    def refresh(self) -> list[str]:
        """Take in what was appended since, by this process or another; the documents it is about."""
        if self.at_edit is not None and len(self) >= self.at_edit:
            return []
        before = len(self)
        for line in self.folder.read(EDITS, start=self.end).splitlines(keepends=True):
            if not line.endswith(b"\n"):
                warnings.warn(
                    f"{self.path} ends in a torn line, which is left out: its writer was interrupted or is not done",
                    stacklevel=3,
                )
                break
            try:
                self._take(line)
            except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
                reason = f"no {error}" if isinstance(error, KeyError) else error
                raise ValueError(f"{self.path}, edit {len(self) + 1} is malformed: {reason}") from error
            if len(self) == self.at_edit:
                break
        return list(dict.fromkeys(self.ids[before:]))

    def append(self, make_entry: Callable[[], Mapping[str, Any]]) -> None:
        """Write one more edit; it is on the disk, and taken in, when this returns.

        Args:
            make_entry: called when the log is locked and all earlier edits are taken in, so that what it checks
                still holds when its entry is written.

        Raises:
            ValueError: the store was opened at an earlier edit, or its file system cannot append.
        """
        if self.at_edit is not None:
            raise ValueError(f"{self.folder} was opened at edit {self.at_edit}; open it without at_edit to change it")
        with self.folder.appending(EDITS) as log:
            self.refresh()
            line = json.dumps({**make_entry(), "base": self.base}, ensure_ascii=False).encode() + b"\n"
            log.cut(self.end)  # a line torn by a crash was never acknowledged
            log.append(line)
        before = len(self)
        self.refresh()
        if len(self) == before:
            raise OSError(f"{self.path}: the edit was written but is not there; does somebody else write to it?")

    def _take(self, line: bytes) -> None:
        entry = json.loads(line)
        op, document_id, number = entry.get("op", "edit"), entry["id"], len(self) + 1
        if not isinstance(document_id, str):
            raise TypeError(f"id is {document_id!r}")
        if entry.get("base", self.base) != self.base:
            raise ValueError(f"it was made on shards of fingerprint {entry['base']}, these have {self.base}")
        if (op == "add") == self.holds(document_id):
            raise ValueError(f"document {document_id!r} {'exists already' if op == 'add' else 'does not exist'}")
        if op == "edit":
            label, value = entry["field"], entry["value"]
            if not isinstance(label, str) or not isinstance(value, str):
                raise TypeError(f"field is {label!r}, value {value!r}")
            self.changed.setdefault(document_id, {})[label] = value
        elif op == "add":
            self.added[document_id] = (self.end, self.end + len(line))
            self.deleted.pop(document_id, None)
        elif op == "delete":
            self.added.pop(document_id, None)
            self.changed.pop(document_id, None)
            self.deleted[document_id] = number
            if self._in_shards(document_id):
                self.hidden.add(document_id)
        else:
            raise ValueError(f"op is {op!r}; allowed are edit, add and delete")
        self.ids.append(document_id)
        self.end += len(line)
