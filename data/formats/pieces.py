"""One piece of a conversion becomes one shard: a pure function of the source and the options, written once.

What a piece leaves, beside the tar and its index, is a record of counts, and the hashes of its ids with their places.
The record is written last: a piece without one is done again from the start, with the same bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy

from data.document_store import Document, to_sample
from data.formats import stamps
from data.formats.format import Format, Piece, Report, Work
from data.formats.id_tables import MemoryIds, hash_of
from data.formats.lines import Lines, write_atomically
from data.passages import Chunking, cut
from data.samples import Pair, Sample, to_members
from data.shards import write_index

STATE = ".preparing"  # the conversion's own files, in the folder that becomes the data set
MAX_FIELDS = 1000  # kinds of questions that are listed


@dataclass(frozen=True)
class Job:
    """All that a process needs to do a piece.

    Attributes:
        folder: what becomes the data set.
        format: with its options.
        lines: surveyed sources by name.
        chunking: how documents are cut.
        rows_per_shard: how many rows of a source a piece has.
        text_every: of how many items the text of one is kept for the tokenizer; 0: of none.
    """

    folder: Path
    format: Format
    lines: dict[str, Lines] = field(default_factory=dict)
    chunking: Chunking = field(default_factory=Chunking)
    rows_per_shard: int = 100_000
    text_every: int = 0

    @property
    def state(self) -> Path:
        """Where the conversion keeps its own files."""
        return self.folder / STATE

    def work(self, report: Report) -> Work:
        """What the format sees."""
        memory = MemoryIds(self.state) if (self.state / "memory-count.npy").exists() else None
        return Work(self.state, self.lines, report, memory, self.rows_per_shard)

    def stem(self, piece: Piece) -> Path:
        """Beginning of the names of a piece's own files."""
        return self.state / f"{piece.folder.replace('/', '-')}-{piece.number:06d}"


def convert(job: Job, piece: Piece) -> dict[str, Any]:
    """Do a piece, or find that it is done; its record.

    Raises:
        ValueError: the source is wrong, or has changed since the piece was done; the message names file and line.
    """
    done = job.stem(piece).with_suffix(".json")
    used = job.stem(piece).with_suffix(".files")
    if done.exists():
        stamps.check_noted(used, job.folder)
        found: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
        return found
    report = Report()
    writer = _Writer(job, piece, report)
    with stamps.noting() as noted:
        try:
            for number, item in job.format.read(piece, job.work(report)):
                writer.add(number, item)
        except BaseException:
            writer.abandon()
            raise
    if noted:
        stamps.write(used, noted)
    record = writer.finish()
    write_atomically(done, json.dumps(record, ensure_ascii=False))
    return record


class _Writer:
    """Writes the items of a piece and keeps count."""

    def __init__(self, job: Job, piece: Piece, report: Report) -> None:
        from webdataset import TarWriter

        self._job, self._piece, self._report = job, piece, report
        self._work = job.work(report)
        directory = job.folder / piece.folder
        directory.mkdir(parents=True, exist_ok=True)
        self._tar = directory / f"shard-{piece.number:06d}.tar"
        self._temporary = self._tar.with_suffix(".tar.tmp")
        self._file = self._temporary.open("wb")
        self._out = TarWriter(self._file, encoder=False, mtime=0, user="data", group="data")
        self._hashes: list[int] = []
        self._places: list[int] = []
        self._passages: list[int] = []
        self._seen: dict[str, int] = {}
        self._fields: dict[str, None] = {}
        self._asked: dict[str, None] = {}
        self._texts: list[str] = []
        self._written = self._pictures = 0

    def _place(self, number: int) -> str:
        return self._job.format.place(self._piece, number, self._work)

    def add(self, number: int, item: Document | Sample | Pair) -> None:
        """Write an item; a document perhaps as several passages."""
        if item.id in self._seen:
            first = self._place(self._seen[item.id])
            raise ValueError(f"{self._place(number)}: id {item.id!r} occurs already in {first}")
        if isinstance(item, Document):
            passages = list(cut(item, self._job.chunking))
            for passage in passages:
                self._write(number, *self._made(number, to_sample, passage))
                self._keep_text(passage.text)
            count = len(passages) if self._job.chunking.words else 0
        else:
            answered = self._with_known_ids(number, item)
            if answered is None:
                return
            self._write(number, *self._made(number, to_members, answered))
            count = 0
            if isinstance(answered, Sample):
                if answered.subject:
                    self._asked[answered.subject] = None
                self._keep_text("\n".join([answered.question, *answered.answers[:1]]))
                if len(self._fields) < MAX_FIELDS and answered.field:
                    self._fields[answered.field] = None
        self._seen[item.id] = number
        self._hashes.append(hash_of(item.id))
        self._places.append(number)
        self._passages.append(count)
        self._pictures += item.image is not None

    def _made(
        self, number: int, make: Callable[[Any], tuple[str, dict[str, bytes]]], item: Any
    ) -> tuple[str, dict[str, bytes]]:
        """Key and members; what is wrong with the id is said with its place."""
        try:
            return make(item)
        except ValueError as error:
            raise ValueError(f"{self._place(number)}: {error}") from None

    def _write(self, number: int, key: str, members: dict[str, bytes]) -> None:
        self._out.write({"__key__": key, **members})
        self._written += 1

    def _keep_text(self, text: str) -> None:
        every = self._job.text_every
        if every and (self._written - 1) % every == 0:
            self._texts.append(text)

    def _with_known_ids(self, number: int, item: Sample | Pair) -> Sample | Pair | None:
        """The item with ids of the memory, or None if without them it is of no use."""
        note, place = self._report.note, self._place(number)
        if isinstance(item, Sample) and not item.answers:
            if self._piece.split == "train":
                note("training question without an answer, left out", place)
                return None
            note("question without an answer, kept with weight 0", place)
        gold, missing = self._known(item.gold)
        negatives, others = self._known(item.hard_negatives)
        note("id of a right document that is not in the memory, dropped", place, missing)
        note("id of a hard negative that is not in the memory, dropped", place, others)
        if isinstance(item, Pair):
            if not gold:
                note("pair without a document in the memory, left out", place)
                return None
            return replace(item, gold=gold, hard_negatives=negatives)
        subject = (self._known((item.subject,))[0] if item.subject else gold) or ("",)
        barred, _ = self._known(item.forbidden)  # what is not there is not found either
        return replace(item, gold=gold, hard_negatives=negatives, forbidden=barred, subject=subject[0])

    def _known(self, ids: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
        assert self._work.memory is not None, "documents come first"
        found = [self._work.memory.ids(document_id) for document_id in dict.fromkeys(ids)]
        return tuple(name for names in found for name in names), sum(not names for names in found)

    def abandon(self) -> None:
        """Remove what was written."""
        self._out.close()
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def finish(self) -> dict[str, Any]:
        """Put the shard in place; the piece's record."""
        job, stem = self._job, self._job.stem(self._piece)
        self._out.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        sha256 = None
        if self._written:
            os.replace(self._temporary, self._tar)
            sha256 = write_index(self._tar, own=True).sha256
        else:
            self._temporary.unlink()
        numpy.savez(
            stem.with_suffix(".npz"),
            hash=numpy.array(self._hashes, numpy.uint64),
            place=numpy.array(self._places, numpy.int64),
            count=numpy.array(self._passages, numpy.int32),
        )
        if self._piece.folder == "documents" and job.chunking.words:
            rows = zip(self._seen, self._passages, strict=True)
            lines = [json.dumps({"id": name, "passages": n}, ensure_ascii=False) + "\n" for name, n in rows]
            write_atomically(stem.with_suffix(".passages"), "".join(lines))
        if self._asked and self._piece.folder == "questions/train":
            write_atomically(stem.with_suffix(".asked"), json.dumps(list(self._asked), ensure_ascii=False))
        if self._texts:
            write_atomically(stem.with_suffix(".texts"), json.dumps(self._texts, ensure_ascii=False))
        return {
            "items": len(self._seen),
            "samples": self._written,
            "pictures": self._pictures,
            "sha256": sha256,
            "fields": list(self._fields),
            "bad": dict(self._report.bad),
            "notes": dict(self._report.notes),
            "first": self._report.first,
        }
