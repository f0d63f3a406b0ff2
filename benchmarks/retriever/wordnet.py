"""Finding WordNet's entries by definitions, before and after training: ``python -m benchmarks.retriever.wordnet``.

The run is that of ``configs/wordnet.yaml`` (how the data set is made stands there). Asked are the first ``--queries``
of the test split by a hash of their ids; none of their entries was a right document in training. The memory is their
entries and others, the first by the same hash, so that ``--documents`` are searched in all (0: the whole memory,
117,659). Search is exact. A definition's own words are not in it and its text is in no document, so BM25, over the
same documents, finds what shares words with the entries around the right one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.pipeline.measuring import machine
from data.dataset import Dataset, Sample
from data.document_store import Document, DocumentStore
from data.factbook_questions import stable_hash
from rag_mm.checkpoint import checkpoint_dir
from rag_mm.evaluate.answer import find_checkpoint
from rag_mm.model import build_model
from retriever.bm25 import Bm25
from retriever.embed import embed_documents
from retriever.encoder import DualEncoder
from retriever.weights import load_weights

RESULTS = Path(__file__).parent / "results" / "wordnet.json"
DEPTH = 10


@dataclass(frozen=True)
class Part:
    """Some documents of a store, as `Bm25` takes them."""

    store: DocumentStore
    ids: list[str]

    def read(self, ids: Sequence[str]) -> list[Document]:
        return self.store.read(ids)


def chosen(dataset: Dataset, *, num_queries: int, num_documents: int) -> tuple[list[Sample], list[str]]:
    """Questions of the test split, and ids of the memory."""
    samples = sorted(dataset.questions("test"), key=lambda s: stable_hash(s.id))[:num_queries]
    gold = {name for sample in samples for name in sample.gold}
    others = sorted((name for name in dataset.store.ids if name not in gold), key=stable_hash)
    if num_documents:
        others = others[: max(0, num_documents - len(gold))]
    return samples, sorted([*gold, *others])


@torch.no_grad()
def found_by(encoder: DualEncoder, store: DocumentStore, samples: list[Sample], ids: list[str]) -> list[list[str]]:
    """The ``DEPTH`` best ids of each question by exact search; documents of like length are embedded together."""
    length: dict[str, int] = {}
    for start in range(0, len(ids), 4096):
        length |= {d.id: len(d.search_text) for d in store.fetch(ids[start : start + 4096])}
    ordered, started = sorted(ids, key=length.__getitem__), time.monotonic()

    done = 0

    def said(count: int) -> None:
        nonlocal done
        done += count
        if done % 5120 < count:
            print(f"{done} of {len(ids)} documents in {time.monotonic() - started:.0f} s", file=sys.stderr)

    document = embed_documents(encoder, store, ordered, image_size=24, batch_size=128, progress=said)
    query = embedded_questions(encoder, [sample.question for sample in samples])
    best = (query @ document.T).topk(DEPTH, dim=1).indices.tolist()
    return [[ordered[i] for i in row] for row in best]


def embedded_questions(encoder: DualEncoder, texts: list[str]) -> Tensor:
    parts = []
    for start in range(0, len(texts), 64):
        some = texts[start : start + 64]
        features = encoder.features(some, torch.ones(len(some), 3, 24, 24), torch.zeros(len(some)), side="query")
        parts.append(encoder(features))
    return torch.cat(parts)


def scores(samples: list[Sample], found: list[list[str]]) -> dict[str, float]:
    """hit@1 and hit@10."""
    hits = [[bool(set(s.gold) & set(ids[:k])) for s, ids in zip(samples, found, strict=True)] for k in (1, DEPTH)]
    return {f"hit@{k}": sum(row) / len(row) for k, row in zip((1, DEPTH), hits, strict=True)}


def measure(run_dir: Path, *, num_queries: int, num_documents: int) -> dict[str, Any]:
    config, step = find_checkpoint(run_dir)
    dataset = Dataset.of(config.data)
    samples, ids = chosen(dataset, num_queries=num_queries, num_documents=num_documents)
    rows: dict[str, dict[str, float]] = {}
    found, _ = Bm25(Part(dataset.store, ids)).search([s.question for s in samples], k=DEPTH)  # type: ignore[arg-type]
    rows["BM25"] = scores(samples, found)
    encoder = build_model(config, dataset).encoder.eval()
    rows["MiniLM, as it comes"] = scores(samples, found_by(encoder, dataset.store, samples, ids))
    load_weights(encoder, checkpoint_dir(run_dir, step))
    asked = step * config.train.retriever_batch_size
    rows[f"MiniLM after {step} steps ({asked:,} questions)"] = scores(
        samples, found_by(encoder, dataset.store, samples, ids)
    )
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "rows": rows,
        "queries": len(samples),
        "documents": len(ids),
        "training_s": sum(sum(line["time_s"].values()) for line in lines),
        "loss": [lines[0]["loss"], lines[-1]["loss"]],
        "machine": machine(),
        "load": os.getloadavg()[1],
        "date": date.today().isoformat(),
    }


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        f"| {result['queries']:,} definitions, {result['documents']:,} entries | hit@1 | hit@10 |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | {row['hit@1']:.3f} | {row['hit@10']:.3f} |" for name, row in result["rows"].items()]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.retriever.wordnet", description=__doc__)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/wordnet"), help="run of configs/wordnet.yaml")
    parser.add_argument("--queries", type=int, default=1000, help="questions asked")
    parser.add_argument("--documents", type=int, default=0, help="documents searched; 0: all")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go")
    options = parser.parse_args(argv)
    result = measure(options.run_dir, num_queries=options.queries, num_documents=options.documents)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    print(table(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
