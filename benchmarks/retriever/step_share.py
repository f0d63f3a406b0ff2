"""What retrieval takes of a training step: ``python -m benchmarks.retriever.step_share``.

The quickstart's model and questions over a million documents: the factbook's, and as many made from them as are missing
(a field's value from one country, the next from another, no picture). Every document is embedded and indexed by the
trainer itself, once; then steps run with the flat index and with the one that ``index.train_factory auto`` makes, in
turn. Retrieval is taking the batch, encoding the queries and searching (``time_s.retrieve`` of the metrics), and
reading the documents from the store; embedding what was found, which the retriever trains on, is not. One process, one
thread.
"""

from __future__ import annotations

import random
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.retriever.measuring import machine, options, report
from data.command_line import parse
from data.dataset import Dataset
from data.document import Document, to_sample
from data.shards import write_shards
from rag_mm.config import Config
from rag_mm.trainer import Trainer
from retriever.approximate import approximate
from retriever.index import Index

WARM = 2  # steps before those that count


def documents(data: str, count: int) -> Iterator[Document]:
    """The data set's documents, and made ones up to ``count``."""
    store = Dataset(data).store
    real = store.read(store.ids)
    yield from real
    draw = random.Random(0)
    filled = [document for document in real if document.fields]
    for i in range(count - len(real)):
        title, fields = draw.choice(filled).title, {}
        for name in draw.choice(filled).fields:
            source = draw.choice(filled).fields
            if name in source:
                fields[name] = source[name]
        yield Document(f"made-{i:07d}", f"{title} {draw.randrange(10**6)}", fields)


def make_store(data: str, folder: Path, count: int) -> Path:
    path = folder / f"store-{Path(data).name}-{count}"
    if not path.exists():
        temporary = path.with_name(f"{path.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        write_shards(temporary, map(to_sample, documents(data, count)))
        temporary.rename(path)
    return path


def main() -> None:
    parser = options("step_share", __doc__.partition("\n")[0], rounds=15)
    parser.add_argument("--data", default="data/factbook", help="data set (default data/factbook)")
    parser.add_argument("--documents", type=int, default=1_000_000, help="in the memory (default 1,000,000)")
    parser.add_argument("--text-dim", type=int, default=128, help="width of the text tower (default 128)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    run_dir = given.folder / "step-share"
    shutil.rmtree(run_dir, ignore_errors=True)
    store = make_store(given.data, given.folder, given.documents)
    flags = [
        "--config", "configs/quickstart.yaml", "--run-dir", run_dir, "--data.dir", given.data,
        "--data.documents", store,
        "--retriever.text_dim", given.text_dim, "--parallel.pipeline_stages", 1, "--parallel.num_microbatches", 1,
        "--parallel.verify", "off", "--train.retriever_share", 0, "--index.refresh", "none",
    ]  # fmt: skip
    config = parse(Config, list(map(str, flags)), prog="", description="")
    trainer = Trainer(config)
    say = Console(stderr=True).print
    say(f"embedding {given.documents} documents")
    started = time.perf_counter()
    trainer.train_step()
    flat = trainer.memory._index
    assert isinstance(flat, Index)
    say(f"{time.perf_counter() - started:.0f} s; making lists")
    started = time.perf_counter()
    lists = approximate(
        flat, "auto", query_QE=trainer.upkeep.tuning(), num_queries=config.index.recall_queries,
        recall=config.index.recall,
    )  # fmt: skip
    say(f"{time.perf_counter() - started:.0f} s")
    read_s = 0.0
    read = trainer.memory.fetch

    def timed(ids: list[str], **how: Any) -> list[Document]:
        nonlocal read_s
        began = time.perf_counter()
        found = read(ids, **how)
        read_s += time.perf_counter() - began
        return found

    trainer.memory.fetch = timed  # type: ignore[method-assign]
    steps: dict[str, list[dict[str, float]]] = {"Flat": [], lists.manifest.factory: []}
    for number in range(WARM + given.rounds):
        for index in (flat, lists) if number % 2 else (lists, flat):  # each tenth step also measures the drift
            trainer.memory._index = index
            read_s, began = 0.0, time.perf_counter()
            record = trainer.train_step()
            step_s = time.perf_counter() - began
            if number >= WARM:
                steps[index.manifest.factory].append(
                    {"search": record["time_s"]["retrieve"], "read": read_s, "step": step_s}
                )
    rows: list[dict[str, Any]] = []
    for name, timed_steps in steps.items():
        share = [(one["search"] + one["read"]) / one["step"] for one in timed_steps]
        rows.append(
            {
                "index": name,
                "recall@10": 1.0 if name == "Flat" else lists.manifest.recall_at_10,
                "encode and search ms": 1e3 * statistics.median(one["search"] for one in timed_steps),
                "read ms": 1e3 * statistics.median(one["read"] for one in timed_steps),
                "step ms": 1e3 * statistics.median(one["step"] for one in timed_steps),
                "share": statistics.median(share),
                "highest": max(share),
            }
        )
    about = {"documents": given.documents, "width": flat.manifest.dim, "batch": config.train.batch_size}
    report(given, {"machine": machine(), **about}, rows, "step_share")


if __name__ == "__main__":
    main()
