"""The document store: the retriever's memory, read by id, edited without rewriting it.

Documents live in indexed shards (`data.shards`): ``<id>.json`` with title, fields and meta, and optionally a picture.
A step of training asks for some hundred ids at once, many of them twice and many of them neighbours: ``fetch`` drops
duplicates, finds all places by one search of the id table (`data.document_table`) and reads them coalesced and
concurrently (`data.random_reads`). What was read lately is kept as it was read, bounded in number and in bytes: parsed,
it would weigh several times that, and on every garbage collection.

Facts change without touching a shard: edits, additions and deletions are lines of a log (`data.edit_log`). The base
fingerprint therefore names the shards for good, and ``version`` says how many edits lie on top, which is what an
index has to know to tell whether it is stale. A store can be opened as it was at an earlier edit.

Where a document is damaged ``fetch`` raises, and ``read`` gives an empty one and counts it (`data.bad_documents`): so
training goes on. An id that does not exist is an error in both.

Shards, table and log may lie on any file system that fsspec knows, with copies of the shards on a local disk
(`data.local_cache`).
"""

from __future__ import annotations

import difflib
import functools
import os
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from data.bad_documents import BadDocuments
from data.document import Document, to_entry, to_sample
from data.document_entries import Entry, entries_of, is_partial, leave_pictures, num_bytes, parse, read_parts
from data.document_ids import DocumentIds
from data.edit_log import EDITS, EditLog
from data.folder import Folder
from data.kept_table import open_table
from data.local_cache import Copies, LocalCache, Source
from data.random_reads import RandomReads
from data.sample_ids import to_key

__all__ = ["EDITS", "Document", "DocumentStore", "to_sample"]


class DocumentStore:
    """Random access to the documents of a folder of shards, with a log of edits on top.

    Safe between threads and across fork; sent to another process, it opens there at the same edit.

    Attributes:
        folder: where the shards lie.
        fingerprint: of the shards, whatever was edited since.
        copies: the node-local copies, or None without a cache folder.
        bad: damaged documents among those that `read` has read.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        at_edit: int | None = None,
        cache_size: int = 4096,
        cache_bytes: int = 256 << 20,
        max_open_files: int = 64,
        num_threads: int = 16,
        cache_dir: str | Path | None = None,
        cache_dir_bytes: int = 1 << 40,
    ) -> None:
        """Open a store.

        Args:
            directory: a path, or any URL that fsspec can read.
            at_edit: read the store as it was after so many edits, and refuse to change it; None for the last.
            cache_size: documents kept in memory at most, as bytes; the least recently used go first.
            cache_bytes: their bytes at most.
            max_open_files: shards open at a time at most.
            num_threads: reads in flight at most.
            cache_dir: folder on a disk of this node for copies of the shards (`data.local_cache`).
            cache_dir_bytes: of all copies in that folder at most.

        Raises:
            FileNotFoundError: there are no shards.
            ValueError: a shard is not indexed or has changed, an id occurs twice, the log of edits is malformed.
        """
        self._cache_size, self._cache_bytes = cache_size, cache_bytes
        self._options = {
            "cache_size": cache_size, "cache_bytes": cache_bytes, "max_open_files": max_open_files,
            "num_threads": num_threads, "cache_dir": cache_dir, "cache_dir_bytes": cache_dir_bytes,
        }  # fmt: skip
        self.folder = Folder(directory)
        self._table = open_table(self.folder, cache_dir=None if cache_dir is None else Path(cache_dir))
        if self._table.left_out:
            reasons = ", ".join(f"{count} x {reason}" for reason, count in sorted(self._table.left_out.items()))
            warnings.warn(f"{self.folder}: samples that are no documents are left out: {reasons}", stacklevel=2)
        self.fingerprint: str = self._table.fingerprint
        self.bad = BadDocuments(f"documents of {self.folder}", total=len(self._table))
        self._log = EditLog(self.folder, base=self.fingerprint, in_shards=self._in_shards, at_edit=at_edit)
        self._log_number = len(self._table.shards)  # the log is the last of the files that documents are read from
        self.copies: Copies | None = None
        if cache_dir is not None:
            cache = LocalCache(cache_dir, store=self.fingerprint, max_bytes=cache_dir_bytes)
            shards = self._table.shards
            sources = [Source(s.sha256, s.size, functools.partial(self.folder.open, s.name)) for s in shards]
            store = weakref.ref(self)  # the thread must not keep alive what it works for

            def use(number: int, path: Path) -> None:
                if (alive := store()) is not None:
                    alive._reads.replace(number, path)

            self.copies = Copies(cache, sources, use)
            weakref.finalize(self, self.copies.stop)
        self._reads = RandomReads(
            [self.folder.path(name) for name in (*(shard.name for shard in self._table.shards), EDITS)],
            filesystem=self.folder.filesystem,
            max_open_files=max_open_files,
            num_threads=num_threads,
            on_first_use=None if self.copies is None else self.copies.want,
            may_grow=[self._log_number],
        )
        self._cache: OrderedDict[str, Entry] = OrderedDict()
        self._cached_bytes = 0
        self._behind: tuple[int, dict[str, int]] = 0, {}
        self._ids: DocumentIds | None = None
        self._lock = threading.RLock()
        self._process = os.getpid()

    def __reduce__(self) -> Any:
        return _open_again, (self.folder.url, self.num_edits, self._options)

    def __len__(self) -> int:
        return len(self._table) - len(self._log.hidden) + len(self._log.added)

    def __contains__(self, document_id: object) -> bool:
        return isinstance(document_id, str) and self._log.holds(document_id)

    @property
    def ids(self) -> DocumentIds:
        """The ids of all documents: those of the shards in their order, then what was added since."""
        with self._guarded():
            if self._ids is None:
                self._ids = DocumentIds(self._table, hidden=list(self._log.hidden), added=list(self._log.added))
            return self._ids

    @property
    def num_edits(self) -> int:
        """Edits, additions and deletions so far."""
        return len(self._log)

    @property
    def version(self) -> str:
        return f"{self.fingerprint[:12]}+{self.num_edits}"

    @property
    def num_reads(self) -> int:
        """Reads of files so far; neighbours that were read together count once."""
        return self._reads.num_reads

    @property
    def num_cached(self) -> tuple[int, int]:
        """Documents kept in memory, and their bytes."""
        return len(self._cache), self._cached_bytes

    def fetch(self, ids: Iterable[str]) -> list[Document]:
        """The documents of ``ids``, in the order asked, all as of the same edit.

        Raises:
            KeyError: there is no such document; says if it was deleted, and by which edit.
            ValueError: a document is malformed.
            OSError: a shard cannot be read.
        """
        return self._fetch(list(ids), None, None)

    def read(self, ids: Iterable[str], *, pictures: Collection[str] | None = None) -> list[Document]:
        """The same, but a damaged document is empty, says so in ``problem``, and counts in ``bad``.

        Whether a picture can be decoded is not looked at; see `condemn`.

        Args:
            pictures: ids of the documents whose pictures are wanted (fast to look up); those of the others may be
                `data.image_formats.Unread`. None: all.

        Raises:
            KeyError: there is no such document.
        """
        wanted, problems = list(ids), dict[str, str]()
        documents = self._fetch(wanted, problems, pictures)
        self.bad.count(self._positions(wanted))
        for document_id, problem in problems.items():
            self.condemn(document_id, problem)
        return documents

    def condemn(self, document_id: str, problem: str) -> None:
        """Count a document as damaged, such as one whose picture could not be decoded."""
        (position,) = self._positions([document_id])
        file = int(self._table.places(position[None])[0][0, 0]) if position < len(self._table) else self._log_number
        self.bad.record(int(position), problem, key=document_id, shard=Path(self._reads.files[file]))

    def _positions(self, ids: list[str]) -> NDArray[numpy.int64]:
        """Where documents are counted: at their place in the table; what stands in the log, behind that."""
        positions = self._table.find(ids)
        if self._log.added:
            with self._guarded():
                if self._behind[0] != len(self._log):
                    places = {name: len(self._table) + i for i, name in enumerate(self._log.added)}
                    self._behind = len(self._log), places
            found = (self._behind[1].get(*pair) for pair in zip(ids, positions.tolist(), strict=True))
            positions = numpy.fromiter(found, numpy.int64, count=len(ids))
        return positions

    def _fetch(
        self, wanted: list[str], problems: dict[str, str] | None, pictures: Collection[str] | None
    ) -> list[Document]:
        """Documents; what is wrong with damaged ones goes into ``problems``, or is raised without it."""
        with self._guarded():
            cache = self._cache
            missing = [
                name for name in dict.fromkeys(wanted)
                if name not in cache or ((pictures is None or name in pictures) and is_partial(cache[name]))
            ]  # fmt: skip
            entries: dict[str, Entry] = {}
            if len(missing) < len(wanted):
                unread = set(missing)
                for document_id in wanted:
                    if document_id not in unread:
                        cache.move_to_end(document_id)
                        entries[document_id] = cache[document_id]
            ranges, extents = self._places(missing)
            if pictures is not None:
                leave_pictures([name not in pictures for name in missing], ranges, extents)
            changed = self._log.changed
            overlay = {name: dict(changed[name]) for name in wanted if name in changed} if changed else {}
            edit = self.num_edits
        if missing:
            parts = read_parts(self._reads, missing, ranges, problems)
            made = zip(missing, entries_of(parts, extents), strict=True)
            read = {name: entry for name, entry in made if entry is not None}
            entries.update(read)
            self._keep(read, edit)
        try:
            found = parse(entries, problems)
        except ValueError as error:
            raise ValueError(f"{self.folder}: {error}") from error
        for document_id, fields in overlay.items():
            if found[document_id].problem is None:
                found[document_id] = replace(found[document_id], fields={**found[document_id].fields, **fields})
        return [found[document_id] for document_id in wanted]

    def _keep(self, read: dict[str, Entry], edit: int) -> None:
        """Put what was read as of ``edit`` into the cache."""
        with self._guarded():
            cache = self._cache
            if len(self._log) > edit or not cache.keys().isdisjoint(read):  # of another thread, or changed meanwhile
                whole = [name for name in read if name in cache and not is_partial(cache[name])]
                for document_id in (*self._log.ids[edit:], *whole):
                    read.pop(document_id, None)
                for document_id in cache.keys() & read.keys():
                    self._drop(document_id)
            cache.update(read)
            total = self._cached_bytes + sum(map(num_bytes, read.values()))
            while len(cache) > self._cache_size or total > self._cache_bytes:
                entry = cache.popitem(last=False)[1]
                total -= len(entry) if type(entry) is bytes else num_bytes(entry)
            self._cached_bytes = total

    def _drop(self, document_id: str) -> None:
        """Keep a document no longer."""
        self._cached_bytes -= num_bytes(self._cache.pop(document_id))

    def _places(self, ids: list[str]) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
        """Of each document the number of its file, first byte and end (N, 3), and its row of extents (N, 5).

        What stands in the log has extents of -1.
        """
        log = self._log
        for document_id in ids if log.deleted else ():
            if document_id in log.deleted:
                edit = log.deleted[document_id]
                raise KeyError(f"document {document_id!r} of {self.folder} was deleted by edit {edit}")
        base = [name for name in ids if name not in log.added] if log.added else ids
        positions = self._table.find(base)
        if len(positions) and positions.min() < 0:
            unknown = base[int((positions < 0).argmax())]
            example = f", such as {self.ids[0]!r}" if len(self) else ""
            raise KeyError(f"no document {unknown!r} in {self.folder}, which holds {len(self)} documents{example}")
        places = self._table.places(positions)
        if len(base) == len(ids):
            return places
        ranges, extents = numpy.empty((len(ids), 3), numpy.int64), numpy.full((len(ids), 5), -1, numpy.int64)
        in_log = numpy.array([name in log.added for name in ids])
        ranges[in_log] = [(self._log_number, *log.added[name]) for name in ids if name in log.added]
        ranges[~in_log], extents[~in_log] = places
        return ranges, extents

    def edit(self, document_id: str, field: str, value: str) -> Document:
        """Set one field of one document for good; returns the document as it now is.

        Raises:
            KeyError: no such document.
            ValueError: the document has no such field, the value is not one line of text, or the store cannot be
                changed here (`EditLog.append`).
        """

        def entry() -> dict[str, Any]:
            document = self.fetch([document_id])[0]
            if field not in document.fields:
                near = difflib.get_close_matches(field, document.fields, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                allowed = ", ".join(document.fields)
                raise ValueError(f"document {document_id!r} has no field {field!r} (it has: {allowed}){hint}")
            if not value.strip() or value.splitlines() != [value]:
                raise ValueError(f"field {field!r} of {document_id!r} must be one non-empty line, is {value!r}")
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                raise ValueError(
                    f"field {field!r} of {document_id!r} is {value!r}, which holds half a character"
                ) from None
            return {"op": "edit", "id": document_id, "field": field, "value": value}

        self._change(entry)
        return self.fetch([document_id])[0]

    def add(self, document: Document) -> None:
        """Add a document for good; it stands in the log, where shards would have to be written anew.

        Raises:
            ValueError: there is one of this id, or the store cannot be changed here (`EditLog.append`).
        """

        def entry() -> dict[str, Any]:
            to_key(document.id)  # refuses what could not be an id in a shard either
            if document.id in self:
                raise ValueError(f"document {document.id!r} exists already; edit it, or delete it first")
            return {"op": "add", **to_entry(document)}

        self._change(entry)

    def delete(self, document_id: str) -> None:
        """Take a document out for good.

        Raises:
            KeyError: no such document.
            ValueError: the store cannot be changed here (`EditLog.append`).
        """

        def entry() -> dict[str, Any]:
            with self._guarded():
                self._places([document_id])
            return {"op": "delete", "id": document_id}

        self._change(entry)

    def refresh(self) -> None:
        """Take in the edits that were appended since, by this process or another."""
        with self._guarded():
            before = self.num_edits
            try:
                self._log.refresh()
            finally:  # the lines before a malformed one count
                self._forget(self._log.ids[before:])

    def edited_ids_since(self, num_edits: int) -> list[str]:
        """Ids edited, added or deleted after the first ``num_edits``, each once, in order of first touch.

        Which of them exist now, ``in`` tells.
        """
        if not 0 <= num_edits <= self.num_edits:
            raise ValueError(f"num_edits is {num_edits}; this store has {self.num_edits} edits")
        return list(dict.fromkeys(self._log.ids[num_edits:]))

    def last_edit_of(self, document_id: str) -> int:
        """Number of the last edit that is about a document, from 1; 0: it is as the shards have it."""
        ids = self._log.ids
        return next((number for number in range(len(ids), 0, -1) if ids[number - 1] == document_id), 0)

    def close(self) -> None:
        """Close all files, when no fetch is under way; the next one opens them again."""
        if self.copies is not None:
            self.copies.close()
        self._reads.close()

    def _in_shards(self, document_id: str) -> bool:
        return bool(self._table.find([document_id])[0] >= 0)

    def _change(self, make_entry: Callable[[], dict[str, Any]]) -> None:
        make_entry()  # what is wrong already is refused before a log is made

        with self._guarded():
            before = self.num_edits

            def entry_now() -> dict[str, Any]:
                self._forget(self._log.ids[before:])
                return make_entry()

            try:
                self._log.append(entry_now)
            finally:
                self._forget(self._log.ids[before:])

    def _forget(self, ids: Iterable[str]) -> None:
        for document_id in ids:
            self._ids = None
            if document_id in self._cache:
                self._drop(document_id)

    def _guarded(self) -> threading.RLock:
        if os.getpid() != self._process:  # a child of fork: whoever held the lock is not here
            self._lock, self._process = threading.RLock(), os.getpid()
        return self._lock


def _open_again(url: str, at_edit: int, options: dict[str, Any]) -> DocumentStore:
    return DocumentStore(url, at_edit=at_edit, **options)
