"""Finding entries of WordNet by definitions, before and after training: ``python -m benchmarks.retriever.wordnet``.

The run is that of ``configs/wordnet.yaml`` (how the data set is made stands there), the two indices are build jobs':

    BUILD="torchrun --nproc-per-node 2 -m -- retriever.build --config configs/wordnet.yaml"
    $BUILD --index.dir runs/wordnet-before
    python train.py --config configs/wordnet.yaml
    $BUILD --index.dir runs/wordnet-after --index.checkpoint runs/wordnet/checkpoints/step-STEPS

Asked are the first ``--queries`` of the test split by a hash of their ids; none of their entries was a right document
in training, all 117,659 are in the memory. A definition's own words are not in it and its text is in no document, so
BM25, over the same documents, finds what shares words with the entries around the right one. "exact" compares a
question with every vector of the index; "through the index" visits the lists that the build job chose.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.pipeline.measuring import machine
from data.dataset import Dataset, Sample
from data.factbook_questions import stable_hash
from rag_mm.checkpoint import checkpoint_dir
from rag_mm.evaluate.answer import find_checkpoint
from rag_mm.model import build_model
from retriever import index as index_files
from retriever.bm25 import Bm25
from retriever.embed import make_manifest
from retriever.encoder import DualEncoder
from retriever.index import Index
from retriever.vector_files import inverted_lists
from retriever.weights import load_weights

RESULTS = Path(__file__).parent / "results" / "wordnet.json"
DOCS = Path(__file__).parents[2] / "docs" / "pretrained.md"
MARK = re.compile(r"<!-- wordnet -->\n.*<!-- /wordnet -->\n", re.DOTALL)
DEPTHS = (1, 10)


def asked(dataset: Dataset, num_queries: int) -> list[Sample]:
    """Questions of the test split."""
    return sorted(dataset.questions("test"), key=lambda s: stable_hash(s.id))[:num_queries]


@torch.no_grad()
def embedded(encoder: DualEncoder, texts: Sequence[str], size: int) -> Tensor:
    """Questions (Q, E), 64 at once."""
    parts = []
    for start in range(0, len(texts), 64):
        some = texts[start : start + 64]
        features = encoder.features(some, torch.ones(len(some), 3, size, size), torch.zeros(len(some)), side="query")
        parts.append(encoder(features))
    return torch.cat(parts)


def found_exactly(index: Index, query_QE: Tensor) -> list[list[str]]:
    """Ids of the best by comparing with every vector, whatever kind of index holds them."""
    if (lists := inverted_lists(index.vectors)) is not None:
        lists.make_direct_map()
    document = torch.from_numpy(index.vectors.reconstruct_n(0, len(index)))
    best = (query_QE @ document.T).topk(max(DEPTHS), dim=1).indices
    return [[index.id(row) for row in rows] for rows in best.tolist()]


def hits(samples: Sequence[Sample], found: Sequence[Sequence[str]]) -> dict[str, float]:
    """hit@1 and hit@10."""
    return {
        f"hit@{k}": sum(bool(set(s.gold) & set(ids[:k])) for s, ids in zip(samples, found, strict=True)) / len(samples)
        for k in DEPTHS
    }


def dense(encoder: DualEncoder, dataset: Dataset, samples: Sequence[Sample], folder: Path, size: int) -> dict[str, Any]:
    """Exact and through the index of a folder, which must be of these weights."""
    index = index_files.load(folder)
    index.manifest.check(make_manifest(encoder, dataset.store, image_size=size), where=str(folder))
    query = embedded(encoder, [sample.question for sample in samples], size)
    through, _ = index.search(query, k=max(DEPTHS))
    return {
        "exact": hits(samples, found_exactly(index, query)),
        "through the index": hits(samples, through),
        "index": {name: getattr(index.manifest, name) for name in ("factory", "effort", "recall_at_10")},
    }


def measure(run_dir: Path, before: Path, after: Path, *, num_queries: int) -> dict[str, Any]:
    config, step = find_checkpoint(run_dir)
    dataset, size = Dataset.of(config.data), config.data.image_size
    samples = asked(dataset, num_queries)
    words, _ = Bm25(dataset.store).search([s.question for s in samples], k=max(DEPTHS))
    rows: dict[str, dict[str, Any]] = {"BM25": {"exact": hits(samples, words)}}
    encoder = build_model(config, dataset).encoder.eval()
    rows["MiniLM, as it comes"] = dense(encoder, dataset, samples, before, size)
    load_weights(encoder, checkpoint_dir(run_dir, step))
    count = step * config.train.retriever_batch_size
    rows[f"MiniLM after {step} steps ({count:,} questions)"] = dense(encoder, dataset, samples, after, size)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "rows": rows,
        "queries": len(samples),
        "documents": len(dataset.store),
        "training_s": sum(sum(line["time_s"].values()) for line in lines[:step]),
        "loss": [lines[0]["loss"], lines[step - 1]["loss"]],
        "machine": machine(),
        "date": date.today().isoformat(),
    }


def table(result: Mapping[str, Any]) -> str:
    """Markdown."""
    lines = [
        f"| {result['queries']:,} definitions, {result['documents']:,} entries | hit@1 | hit@10 | through the index |",
        "|---|---:|---:|---:|",
    ]
    for name, row in result["rows"].items():
        exact = " | ".join(f"{row['exact'][f'hit@{k}']:.3f}" for k in DEPTHS)
        through = ""
        if "index" in row:
            index = row["index"]
            through = f"{row['through the index']['hit@10']:.3f} ({index['effort']} of {index['factory']})"
        lines.append(f"| {name} | {exact} | {through} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.retriever.wordnet", description=__doc__)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/wordnet"), help="run of configs/wordnet.yaml")
    parser.add_argument(
        "--before", type=Path, default=Path("runs/wordnet-before"), help="index of the weights as they come"
    )
    parser.add_argument("--after", type=Path, default=Path("runs/wordnet-after"), help="index of the trained weights")
    parser.add_argument("--queries", type=int, default=2000, help="questions asked")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/pretrained.md")
    options = parser.parse_args(argv)
    result = measure(options.run_dir, options.before, options.after, num_queries=options.queries)
    text = table(result)
    print(text)
    RESULTS.write_text(json.dumps(result, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    if options.docs:
        given = DOCS.read_text(encoding="utf-8")
        assert MARK.search(given), f"{DOCS} has no place for the table"
        DOCS.write_text(MARK.sub(lambda _: f"<!-- wordnet -->\n{text}\n<!-- /wordnet -->\n", given), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
