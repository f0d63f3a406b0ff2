"""From users' files to a data set: survey, convert in pieces, check what only the whole can show, put in place.

The folder grows beside its place under another name and is renamed when whole. Its pieces are pure functions of the
sources and options, so a conversion that is killed goes on where it was when the same command is given again, does
nothing twice, and gives the same bytes as one that was not. Memory is bounded by one piece a process, and by eight
bytes of hash for every id.
"""

from __future__ import annotations

import collections
import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import numpy

from data.formats.format import SPLITS, Format, Piece, Report
from data.formats.id_tables import MemoryIds, hashes_of
from data.formats.lines import SourceFile, survey, write_atomically
from data.formats.pieces import STATE, Job, convert
from data.passages import Chunking
from data.sample_ids import from_key
from data.shard_set import ShardSet

FORMAT = 1
MAX_TEXTS = 200_000  # texts that a tokenizer is trained on
ENOUGH = 1000  # items after which the share of bad pictures is believed before the end

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Common:
    """What can be asked of every format.

    Attributes:
        out: the folder to make.
        workers: processes.
        chunking: how documents are cut into passages.
        rows_per_shard: lines or rows of a source a shard is made of; 0: what suits the format.
        max_bad_share: pictures that may be missing or broken, as a share of all items.
        vocabulary: entries of the tokenizer trained on the texts; 0: none is trained.
        licence: of the data, as the user knows it.
        memory: a prepared data set whose documents are taken instead of the format's own.
    """

    out: Path
    workers: int = 1
    chunking: Chunking = field(default_factory=Chunking)
    rows_per_shard: int = 0
    max_bad_share: float = 0.01
    vocabulary: int = 8000
    licence: str = "unknown"
    memory: Path | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"--workers is {self.workers}; it must be at least 1")
        if self.rows_per_shard < 0:
            raise ValueError(f"--rows-per-shard is {self.rows_per_shard}; it must be 0 (what suits the format) or more")
        if not 0 <= self.max_bad_share <= 1:
            raise ValueError(f"--max-bad-share is {self.max_bad_share}; it must be between 0 and 1")
        if self.vocabulary and self.vocabulary < 300:
            raise ValueError(f"--vocabulary is {self.vocabulary}; it must be 0 (none) or at least 300 (256 are bytes)")
        if self.memory is not None and self.chunking.words:
            raise ValueError("--passage-words cuts documents, but --memory brings documents that are cut already")


def prepare(form: Format, common: Common, *, progress: Progress = lambda what, share: None) -> dict[str, Any] | None:
    """Convert; the contents of ``dataset.json``, or None when this very data set lies there already.

    Raises:
        ValueError: the sources are wrong, or something else lies at ``out``; the message says what and where.
    """
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
    with _pool(job, common.workers, len(pieces)) as run:
        records |= _convert(run, documents, common, progress, begin=0.1, total=len(pieces))
        if common.memory is None:
            _index_documents(job, documents)
        else:
            _borrow(common.memory, job)
        begin = 0.1 + 0.8 * len(documents) / max(1, len(pieces))
        records |= _convert(run, others, common, progress, begin=begin, total=len(pieces))
    for folder in dict.fromkeys(piece.folder for piece in others):
        _check_ids(job, [piece for piece in others if piece.folder == folder])
    progress("finishing", 0.9)
    return _finish(job, common, spec, sources, records)


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


# Processes


@contextmanager
def _pool(job: Job, workers: int, num_pieces: int) -> Iterator[Callable[[Piece], Future[dict[str, Any]]]]:
    """Something that begins a piece and gives its future: in processes of their own, or at once in this one."""
    if workers == 1 or num_pieces == 1:
        yield lambda piece: _at_once(job, piece)
        return
    pool = ProcessPoolExecutor(min(workers, num_pieces), get_context("spawn"), initializer=_follow_parent)
    try:
        yield lambda piece: pool.submit(convert, job, piece)
    finally:
        pool.shutdown(cancel_futures=True)


def _at_once(job: Job, piece: Piece) -> Future[dict[str, Any]]:
    future: Future[dict[str, Any]] = Future()
    try:
        future.set_result(convert(job, piece))
    except ValueError as error:
        future.set_exception(error)
    return future


def _follow_parent() -> None:
    """End this process when the one that started it has ended, however it did."""
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _convert(
    run: Callable[[Piece], Future[dict[str, Any]]],
    pieces: Sequence[Piece],
    common: Common,
    progress: Progress,
    *,
    begin: float,
    total: int,
) -> dict[Piece, dict[str, Any]]:
    """Do the pieces; their records in order. The first error, by place, is the one that is raised."""
    records: dict[Piece, dict[str, Any]] = {}
    waiting: collections.deque[tuple[Piece, Future[dict[str, Any]]]] = collections.deque()
    rest = collections.deque(pieces)
    try:
        while rest or waiting:
            while rest and len(waiting) < 2 * common.workers:  # not all at once: an error stops those behind it
                waiting.append((rest[0], run(rest.popleft())))
            piece, future = waiting.popleft()
            records[piece] = future.result()
            _check_bad(records.values(), common, at_end=False)
            progress(f"converting {piece.folder}", begin + 0.8 * len(records) / total)
    except BrokenProcessPool:
        raise RuntimeError(
            "a worker process died (out of memory?); the same command, with fewer --workers, goes on from here"
        ) from None
    _check_bad(records.values(), common, at_end=True)
    return records


def _check_bad(records: Iterable[dict[str, Any]], common: Common, *, at_end: bool) -> None:
    records = list(records)
    bad: collections.Counter[str] = collections.Counter()
    first: dict[str, str] = {}
    for record in records:
        bad.update(record["bad"])
        first = {**record["first"], **first}
    seen = sum(record["items"] for record in records) + bad.total()
    if bad and (at_end or seen >= ENOUGH) and bad.total() > common.max_bad_share * seen:
        reasons = "; ".join(f"{n} x {reason}, first {first[reason]}" for reason, n in sorted(bad.items()))
        raise ValueError(
            f"{bad.total()} of {seen} pictures cannot be used, more than --max-bad-share {common.max_bad_share:g} "
            f"allows: {reasons}"
        )


# Ids


def _ids(job: Job, pieces: Sequence[Piece], what: str) -> numpy.ndarray:
    parts = []
    for piece in pieces:
        with numpy.load(job.stem(piece).with_suffix(".npz"), allow_pickle=False) as kept:
            parts.append(kept[what])
    return numpy.concatenate(parts) if parts else numpy.zeros(0, numpy.uint64)


def _check_ids(job: Job, pieces: Sequence[Piece]) -> None:
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


def _index_documents(job: Job, pieces: Sequence[Piece]) -> None:
    _check_ids(job, pieces)
    hashes, counts = _ids(job, pieces, "hash"), _ids(job, pieces, "count")
    if not len(hashes):
        raise ValueError("the sources hold no document that can be used")
    MemoryIds.write(job.state, hashes, counts)


def _borrow(memory: Path, job: Job) -> None:
    """Take the documents of another data set: hard links where the disk can, copies where not."""
    if not (memory / "dataset.json").is_file():
        raise ValueError(f"--memory is {memory}, which is no prepared data set (it has no dataset.json)")
    if (memory / "documents" / "edits.jsonl").exists():
        raise ValueError(f"--memory is {memory}, whose documents were edited since; prepare it again without edits")
    target = job.folder / "documents"
    target.mkdir(exist_ok=True)
    for file in sorted((memory / "documents").iterdir()):
        if not file.name.startswith("shard-") or (target / file.name).exists():
            continue
        try:
            os.link(file, target / file.name)
        except OSError:
            temporary = target / f"{file.name}.tmp"
            shutil.copy2(file, temporary)
            os.replace(temporary, target / file.name)
    cut = memory / "passages.jsonl"
    if cut.exists():
        shutil.copyfile(cut, job.state / "borrowed.passages")
        rows = [json.loads(line) for line in cut.open(encoding="utf-8")]
        MemoryIds.write(job.state, hashes_of(row["id"] for row in rows), numpy.array([row["passages"] for row in rows]))
    else:
        hashes = hashes_of(map(from_key, ShardSet(target).keys()))
        MemoryIds.write(job.state, hashes, numpy.zeros(len(hashes)))


# The end


def _finish(
    job: Job, common: Common, spec: dict[str, Any], sources: Sequence[SourceFile], records: dict[Piece, dict[str, Any]]
) -> dict[str, Any]:
    folder = job.folder
    for leftover in folder.glob("**/shard-*.tmp*"):  # of pieces that were killed and done again
        leftover.unlink()
    samples: dict[str, dict[str, int]] = {"questions": {}, "pairs": {}}
    for part, counts in samples.items():
        for split in SPLITS:
            found = [r["samples"] for piece, r in records.items() if piece.folder == f"{part}/{split}"]
            (folder / part / split).mkdir(parents=True, exist_ok=True)
            counts[split] = sum(found)
    _write_json(folder / "splits.json", {"splits": samples})
    _join_passages(job, list(records))
    asked = {name for piece in records for name in _kept(job, piece, ".asked")}
    _write_json(folder / "asked.json", sorted(asked))
    digest = hashlib.sha256()
    for piece, record in records.items():
        digest.update(f"{piece.folder} {piece.number} {record['sha256']}\n".encode())
    if common.memory is not None:
        digest.update(ShardSet(folder / "documents").fingerprint.encode())
    digest.update((folder / "splits.json").read_bytes())
    tokenizer = _train_tokenizer(job, common, list(records), digest)
    documents = [r for piece, r in records.items() if piece.folder == "documents"]
    num_documents = sum(r["samples"] for r in documents)
    borrowed = None
    if common.memory is not None:
        borrowed = json.loads((common.memory / "dataset.json").read_text(encoding="utf-8"))["fingerprint"]
        num_documents = len(ShardSet(folder / "documents"))
    info = {
        "name": job.format.name,
        "format": FORMAT,
        "fingerprint": digest.hexdigest(),
        "fields": sorted({name for record in records.values() for name in record["fields"]}),
        "counts": {
            "documents": {"document" if not job.chunking.words else "passage": num_documents},
            "documents_in_source": sum(r["items"] for r in documents),
            "pictures_of_documents": sum(r["pictures"] for r in documents),
            **samples,
        },
        "left_out": _summed(records, "bad"),
        "notes": _summed(records, "notes"),
        "tokenizer": tokenizer,
        "licences": [{"what": "everything", "licence": common.licence}],
        "memory_of": borrowed,
        "sources": [
            {"file": source.path.name, "bytes": lines.size, "sha256": lines.sha256}
            for source in sources
            for lines in [job.lines[source.name]]
        ],
        "made_by": spec,
    }
    _write_json(folder / "dataset.json", info)  # last: a folder that has it is whole
    return info


def _join_passages(job: Job, pieces: Sequence[Piece]) -> None:
    files = [job.stem(piece).with_suffix(".passages") for piece in pieces if piece.folder == "documents"]
    files = [file for file in [*files, job.state / "borrowed.passages"] if file.exists()]
    if files:
        with (job.folder / "passages.jsonl").open("wb") as out:
            for file in files:
                with file.open("rb") as part:
                    shutil.copyfileobj(part, out)


def _train_tokenizer(job: Job, common: Common, pieces: Sequence[Piece], digest: Any) -> str:
    if not common.vocabulary:
        return "none"
    from data import vocabulary

    def texts() -> Iterator[str]:
        for piece in pieces:
            yield from _kept(job, piece, ".texts")

    count = sum(1 for _ in texts())
    trained = vocabulary.train(texts(), size=common.vocabulary)
    vocabulary.save(trained, job.folder / "tokenizer")
    digest.update((job.folder / "tokenizer" / "tokenizer.json").read_bytes())
    return (
        f"byte-level BPE, {trained.get_vocab_size()} entries, trained on {count} texts: every "
        f"{job.text_every}th of each shard, of the memory and of the questions of all splits"
    )


def _kept(job: Job, piece: Piece, suffix: str) -> list[str]:
    """A list of texts that a piece left, if it did."""
    path = job.stem(piece).with_suffix(suffix)
    found: list[str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return found


def _summed(records: dict[Piece, dict[str, Any]], what: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for record in records.values():
        for reason, count in record[what].items():
            entry = found.setdefault(reason, {"count": 0, "first": record["first"][reason]})
            entry["count"] += count
    return dict(sorted(found.items()))


def _spec(form: Format, common: Common) -> dict[str, Any]:
    """What decides the bytes of the data set, as far as the command says it."""
    shared = {k: v for k, v in asdict(common).items() if k not in ("out", "workers")}
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


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
