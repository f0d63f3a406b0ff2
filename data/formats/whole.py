"""What only the whole of the pieces can show: that ids are unique, and which documents there are."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy

from data.formats.format import Piece, Report
from data.formats.id_tables import MemoryIds, hash_of, hashes_of
from data.formats.pieces import Job
from data.json_files import read_json
from data.sample_ids import from_key
from data.shard_index import SUFFIX
from data.shard_set import ShardSet


def _ids(job: Job, pieces: Sequence[Piece], what: str) -> numpy.ndarray:
    parts = []
    for piece in pieces:
        with numpy.load(job.stem(piece).with_suffix(".npz"), allow_pickle=False) as kept:
            parts.append(kept[what])
    return numpy.concatenate(parts) if parts else numpy.zeros(0, numpy.uint64)


def check_ids(job: Job, pieces: Sequence[Piece]) -> None:
    """ValueError if two pieces hold an item of the same id; within one, the piece itself has looked."""
    hashes = _ids(job, pieces, "hash")
    order = numpy.argsort(hashes, kind="stable")
    equal = numpy.flatnonzero(hashes[order][1:] == hashes[order][:-1])
    if not len(equal):
        return
    sizes = [len(_ids(job, [piece], "hash")) for piece in pieces]
    ends = numpy.cumsum(sizes)
    places = _ids(job, pieces, "place")
    work = job.work(Report())
    pairs = sorted((int(order[i + 1]), int(order[i])) for i in equal)
    where = []
    for position in pairs[0]:
        piece = pieces[int(numpy.searchsorted(ends, position, side="right"))]
        where.append(job.format.place(piece, int(places[position]), work))
    raise ValueError(f"{where[0]}: the id occurs already in {where[1]}; ids must be unique")


def index_documents(job: Job, pieces: Sequence[Piece]) -> None:
    check_ids(job, pieces)
    hashes, counts = _ids(job, pieces, "hash"), _ids(job, pieces, "count")
    if not len(hashes):
        raise ValueError("the sources hold no document that can be used")
    MemoryIds.write(job.state, hashes, counts)


def fingerprint_of(memory: Path) -> str:
    """The fingerprint of a data set whose documents are used; ValueError if its ``dataset.json`` is damaged."""
    found = read_json(memory / "dataset.json").get("fingerprint")
    if not isinstance(found, str):
        raise ValueError(f"--memory is {memory}, whose dataset.json holds no fingerprint; prepare it again")
    return found


def borrow_documents(memory: Path, job: Job) -> None:
    """Take the documents of another data set: hard links where the disk can, copies where not."""
    if not (memory / "dataset.json").is_file():
        raise ValueError(f"--memory is {memory}, which is no prepared data set (it has no dataset.json)")
    fingerprint_of(memory)
    if (memory / "documents" / "edits.jsonl").exists():
        raise ValueError(f"--memory is {memory}, whose documents were edited since; prepare it again without edits")
    target = job.folder / "documents"
    target.mkdir(exist_ok=True)
    for file in sorted((memory / "documents").iterdir()):
        if not file.name.endswith((".tar", SUFFIX)) or (target / file.name).exists():
            continue
        try:
            os.link(file, target / file.name)
        except OSError:
            temporary = target / f"shard-{file.name}.tmp"  # which `finish` removes if this is killed
            shutil.copy2(file, temporary)
            os.replace(temporary, target / file.name)
    cut = memory / "passages.jsonl"
    if cut.exists():
        shutil.copyfile(cut, job.state / "borrowed.passages")
        with cut.open(encoding="utf-8") as lines:
            rows = ((hash_of(row["id"]), row["passages"]) for row in map(json.loads, lines))
            found = numpy.fromiter(rows, numpy.dtype([("hash", numpy.uint64), ("count", numpy.int64)]))
        MemoryIds.write(job.state, found["hash"], found["count"])
    else:
        hashes = hashes_of(map(from_key, ShardSet(target).keys()))
        MemoryIds.write(job.state, hashes, numpy.zeros(len(hashes)))
