"""The end of a conversion: splits, tokenizer, fingerprint and ``dataset.json``, from what the pieces left."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data import vocabulary
from data.formats.common import Common
from data.formats.format import SPLITS, Piece, Report
from data.formats.lines import SourceFile
from data.formats.pieces import Job
from data.formats.whole import fingerprint_of
from data.shard_set import ShardSet

FORMAT = 1


def finish(
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
        borrowed = fingerprint_of(common.memory)
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
        "columns": job.format.columns(job.work(Report())),
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


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
