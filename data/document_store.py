"""The document store: the retriever's memory on disk, read by id, edited without rewriting it.

Documents live in indexed shards (`data.shards`): ``<id>.json`` with title, fields and meta, and optionally
``<id>.png``. A step of training asks for some hundred ids at once, many of them twice and many of them
neighbours, so ``fetch`` drops duplicates, sorts by (shard, offset) and joins adjacent samples into one
``pread``.

Facts change without touching a shard: an edit is one line of ``edits.jsonl``, appended and flushed to disk
before ``edit`` returns. The base fingerprint therefore names the shards for good, and ``version`` says how
many edits lie on top, which is what an index has to know to tell whether it is stale. The price is that
all edits are held in memory; at the point where that hurts, a store wants to be written anew.
"""

from __future__ import annotations

import difflib
import fcntl
import json
import os
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data import shards
from data.image_formats import extension_of, picture_member
from data.sample_ids import from_key, to_key

EDITS = "edits.jsonl"


@dataclass(frozen=True)
class Document:
    """One entry of the memory.

    Attributes:
        id: unique in its store.
        title: one line; may be empty.
        fields: label -> value, in the order they are written out; one line each.
        image: picture as it was encoded (PNG, JPEG, ...), or None.
        passage: running text of any number of lines, or empty.
        meta: whatever else the converter kept; never shown to a model.
    """

    id: str
    title: str
    fields: dict[str, str]
    image: bytes | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    passage: str = ""

    def __post_init__(self) -> None:
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
    body: dict[str, Any] = {"title": document.title, "fields": document.fields, "meta": document.meta}
    if document.passage:
        body["passage"] = document.passage
    members = {"json": json.dumps(body, ensure_ascii=False).encode()}
    if document.image is not None:
        members[extension_of(document.image) or "png"] = document.image
    return to_key(document.id), members


class DocumentStore:
    """Random access to the documents of a folder of shards, with an append-only log of edits."""

    def __init__(self, directory: str | Path, *, cache_size: int = 4096) -> None:
        """Open a store; ``cache_size`` bounds the documents kept parsed (least recently used go first)."""
        self.directory = Path(directory)
        self._shards = shards.open_shards(self.directory)
        self._place: dict[str, tuple[int, int, int]] = {}  # id -> shard, first byte, end
        for number, shard in enumerate(self._shards):
            for key, members in shard.index.samples.items():
                if from_key(key) in self._place:
                    raise ValueError(f"{shard.index.tar}: document id {key!r} occurs twice in the store")
                if "json" not in members:
                    raise ValueError(f"{shard.index.tar}: document {key!r} has no json member")
                self._place[from_key(key)] = (number, *shards.extent(members))
        self.ids: list[str] = list(self._place)
        self.fingerprint: str = shards.contents_fingerprint(self._shards)
        self.num_reads = 0  # preads so far; a test holds fetch to its promise by it
        self._cache: OrderedDict[str, Document] = OrderedDict()
        self._cache_size = cache_size
        self._edits: list[tuple[str, str, str]] = []
        self._edited: dict[str, dict[str, str]] = {}
        self._edits_end = 0  # bytes of the log taken in so far
        self.refresh()

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, document_id: object) -> bool:
        return document_id in self._place

    @property
    def num_edits(self) -> int:
        return len(self._edits)

    @property
    def version(self) -> str:
        return f"{self.fingerprint[:12]}+{self.num_edits}"

    def fetch(self, ids: Iterable[str]) -> list[Document]:
        """The documents of ``ids``, in the order asked; KeyError names an id that does not exist."""
        wanted = list(ids)
        for document_id in wanted:
            if document_id not in self._place:
                raise KeyError(f"no document {document_id!r} in {self.directory}")
        found: dict[str, Document] = {}
        missing: list[str] = []
        for document_id in dict.fromkeys(wanted):
            document = self._cache.get(document_id)
            if document is None:
                missing.append(document_id)
            else:
                self._cache.move_to_end(document_id)
                found[document_id] = document
        for document_id, document in self._read(missing):
            found[document_id] = document
            self._cache[document_id] = document
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)
        return [found[document_id] for document_id in wanted]

    def _read(self, ids: list[str]) -> Iterable[tuple[str, Document]]:
        """Parse ``ids`` from disk: sorted, runs of adjacent samples in one read."""
        runs: list[list[str]] = []
        for document_id in sorted(ids, key=self._place.__getitem__):
            number, start, _ = self._place[document_id]
            if runs:
                last_number, _, last_end = self._place[runs[-1][-1]]
                # neighbours are a member header and padding apart
                if number == last_number and start - last_end <= 1024:
                    runs[-1].append(document_id)
                    continue
            runs.append([document_id])
        for run in runs:
            number, begin, _ = self._place[run[0]]
            shard = self._shards[number]
            data = shard.read(begin, self._place[run[-1]][2] - begin)
            self.num_reads += 1
            for document_id in run:
                members = {
                    ext: data[offset - begin : offset - begin + size]
                    for ext, (offset, size) in shard.index.samples[to_key(document_id)].items()
                }
                yield document_id, self._parse(document_id, members)

    def _parse(self, document_id: str, members: Mapping[str, bytes]) -> Document:
        try:
            body = json.loads(members["json"])
            fields = {**body["fields"], **self._edited.get(document_id, {})}
            return Document(
                document_id, body["title"], fields, picture_member(members), body.get("meta", {}),
                body.get("passage", ""),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.directory}: document {document_id!r} is malformed: {error}") from error

    def edit(self, document_id: str, field: str, value: str) -> Document:
        """Set one field of one document for good; returns the document as it now is.

        Raises:
            KeyError: no such document.
            ValueError: the document has no such field, or the value is not one line of text.
        """
        document = self.fetch([document_id])[0]
        if field not in document.fields:
            near = difflib.get_close_matches(field, document.fields, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            allowed = ", ".join(document.fields)
            raise ValueError(f"document {document_id!r} has no field {field!r} (it has: {allowed}){hint}")
        if not value.strip() or "\n" in value:
            raise ValueError(f"field {field!r} of {document_id!r} must be one non-empty line, is {value!r}")
        line = json.dumps({"id": document_id, "field": field, "value": value}, ensure_ascii=False) + "\n"
        with (self.directory / EDITS).open("a+b") as log:
            fcntl.flock(log, fcntl.LOCK_EX)  # another process may edit the same store
            self.refresh()
            log.truncate(self._edits_end)  # a line torn by a crash was never acknowledged
            log.write(line.encode())
            log.flush()
            os.fsync(log.fileno())
        self.refresh()
        return self.fetch([document_id])[0]

    def refresh(self) -> None:
        """Take in the edits that were appended since, by this process or another."""
        path = self.directory / EDITS
        if not path.exists():
            return
        with path.open("rb") as log:
            log.seek(self._edits_end)
            tail = log.read()
        for line in tail.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                warnings.warn(f"{path} ends in a torn line, which is left out", stacklevel=2)
                break
            try:
                entry = json.loads(line)
                document_id, label, value = entry["id"], entry["field"], entry["value"]
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, edit {len(self._edits) + 1} is malformed: {error}") from error
            if document_id not in self._place:
                raise ValueError(f"{path}, edit {len(self._edits) + 1}: no document {document_id!r}")
            self._edits.append((document_id, label, value))
            self._edited.setdefault(document_id, {})[label] = value
            self._cache.pop(document_id, None)
            self._edits_end += len(line)

    def edited_ids_since(self, num_edits: int) -> list[str]:
        """Ids touched by the edits after the first ``num_edits``, each once, in order of first touch."""
        if not 0 <= num_edits <= self.num_edits:
            raise ValueError(f"num_edits is {num_edits}; this store has {self.num_edits} edits")
        return list(dict.fromkeys(document_id for document_id, _, _ in self._edits[num_edits:]))
