"""From users' files to a data set: survey, convert in pieces, check what only the whole can show, put in place.

The folder grows beside its place under another name and is renamed when whole. Its pieces are pure functions of the
sources and options, so a conversion that is killed goes on where it was when the same command is given again, does
nothing twice, and gives the same bytes as one that was not. Memory is bounded by one piece a process, and by eight
bytes of hash for every id.
"""

from __future__ import annotations

import collections
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from data.formats import stamps
from data.formats.common import Common
from data.formats.finishing import finish
from data.formats.format import Format, Piece, Report
from data.formats.lines import SourceFile, survey, write_atomically
from data.formats.pieces import STATE, Job
from data.formats.processes import Progress, convert_all, pool
from data.formats.whole import borrow_documents, check_ids, index_documents

MAX_TEXTS = 200_000  # texts that a tokenizer is trained on


def prepare(form: Format, common: Common, *, progress: Progress = lambda what, share: None) -> dict[str, Any] | None:
    """Convert; the contents of ``dataset.json``, or None when this very data set lies there already.

    Raises:
        ValueError: the sources are wrong, or something else lies at ``out``; the message says what and where.
    """
    if form.shard_a_file and common.rows_per_shard:
        raise ValueError(
            f"--rows-per-shard is {common.rows_per_shard}, but {form.name} makes a shard of each of its tars"
        )
    out, spec = common.out, _spec(form, common)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        if _made_by(out / "dataset.json") == spec:
            shutil.rmtree(out / STATE, ignore_errors=True)  # of a run that was killed at the very end
            return None
        raise ValueError(f"--out is {out}, which holds something else; name a new folder or remove that one")
    building = out.with_name(f".{out.name}.preparing")
    (building / STATE).mkdir(parents=True, exist_ok=True)
    with _locked(building / STATE / "lock", building):
        path = building / STATE / "spec.json"
        if path.exists():
            _check_same(json.loads(path.read_text(encoding="utf-8")), spec, building)
        write_atomically(path, json.dumps(spec, ensure_ascii=False))
        try:
            info = _build(form, common, building, spec, progress)
        except ValueError:
            if not any((building / STATE).glob("*.npz")):  # nothing was done that would be worth keeping
                shutil.rmtree(building, ignore_errors=True)
            raise
        os.replace(building, out)
        shutil.rmtree(out / STATE)
    progress("done", 1.0)
    return info


def _build(form: Format, common: Common, building: Path, spec: dict[str, Any], progress: Progress) -> dict[str, Any]:
    memory = [] if common.memory is None else [common.memory / "dataset.json"]
    stamps.check_same(building / STATE / "stamps.json", {**form.stamps(), **stamps.stamps(memory)}, building)
    rows = common.rows_per_shard or form.rows_per_shard
    job = Job(building, form, chunking=common.chunking, rows_per_shard=rows)
    sources = form.sources()
    job = replace(job, lines=_survey(sources, job, progress))
    derived = form.derive(job.work(Report()))
    job = replace(job, lines=job.lines | _survey(derived, job, lambda what, share: None))
    pieces = _numbered(form.pieces(job.work(Report())))
    if common.vocabulary:
        total = sum(lines.num_lines for lines in job.lines.values()) or len(pieces) * rows
        job = replace(job, text_every=max(1, total // MAX_TEXTS))
    documents = [piece for piece in pieces if piece.folder == "documents"]
    others = [piece for piece in pieces if piece.folder != "documents"]
    if common.memory is not None:
        documents = []
    elif not documents:
        raise ValueError(f"{form.name} brings no documents with these options; give --memory, a prepared data set")
    if not documents and not others:
        raise ValueError(f"{form.name} has nothing to convert with these options")
    records: dict[Piece, dict[str, Any]] = {}
    with pool(job, common.workers, len(pieces)) as run:
        records |= convert_all(run, documents, common, progress, begin=0.1, total=len(pieces))
        if common.memory is None:
            index_documents(job, documents)
        else:
            borrow_documents(common.memory, job)
        begin = 0.1 + 0.8 * len(documents) / max(1, len(pieces))
        records |= convert_all(run, others, common, progress, begin=begin, total=len(pieces))
    for folder in dict.fromkeys(piece.folder for piece in others):
        check_ids(job, [piece for piece in others if piece.folder == folder])
    progress("finishing", 0.9)
    return finish(job, common, spec, sources, records)


def _survey(sources: Sequence[SourceFile], job: Job, progress: Progress) -> dict[str, Any]:
    size = sum(s.path.stat().st_size for s in sources if s.path.is_file()) or 1
    read, found = 0, {}

    def advance(count: int) -> None:
        nonlocal read
        read += count
        progress("reading the sources once", 0.1 * min(1.0, read / size))

    for source in sources:
        found[source.name] = survey(source, job.state, every=job.rows_per_shard, advance=advance)
    return found


def _numbered(pieces: Iterable[Piece]) -> list[Piece]:
    count: collections.Counter[str] = collections.Counter()
    numbered = []
    for piece in pieces:
        numbered.append(replace(piece, number=count[piece.folder]))
        count[piece.folder] += 1
    return numbered


def _spec(form: Format, common: Common) -> dict[str, Any]:
    """What decides the bytes of the data set, as far as the command says it."""
    shared = {k: v for k, v in asdict(common).items() if k not in ("out", "workers", "max_bad_share")}
    shared["memory"] = None if common.memory is None else str(common.memory)
    return {"format": form.name, "options": form.describe(), "common": shared}


def _made_by(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("made_by")
    except (OSError, ValueError, AttributeError):
        return None


def _check_same(begun: dict[str, Any], spec: dict[str, Any], building: Path) -> None:
    if begun == spec:
        return
    flat = [
        {"format": s["format"], **s["options"], **{k: v for k, v in s["common"].items() if k != "chunking"},
         **s["common"]["chunking"]}
        for s in (begun, spec)
    ]  # fmt: skip
    other = [
        f"{k} was {flat[0].get(k)!r}, is {flat[1].get(k)!r}"
        for k in dict.fromkeys([*flat[0], *flat[1]])
        if flat[0].get(k) != flat[1].get(k)
    ]
    raise ValueError(
        f"{building} holds a conversion that was begun with other options ({'; '.join(other)}); "
        "give the same ones to go on, or remove it to begin anew"
    )


@contextmanager
def _locked(path: Path, building: Path) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is converting into {building}; wait for it or end it") from None
        yield
