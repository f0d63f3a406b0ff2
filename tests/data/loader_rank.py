"""One rank that reads a stretch: ``python -m tests.data.loader_rank SETTINGS``; prints rows and cursor as JSON."""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

from data.cursor import Batches, Cursor
from data.loader import Loader, Part
from data.order import Order
from data.shard_set import ShardSet


def number(sample: Any) -> int:
    return int(sample.members["txt"])


def batches_of(settings: dict[str, Any]) -> Batches:
    order = Order(settings["num"], "f", settings["seed"], chunk=settings["chunk"], window=settings["window"])
    return Batches(order, settings["size"], settings["tail"])


def read(settings: dict[str, Any]) -> dict[str, Any]:
    """Rows (batch, key, what stands in the sample, weight) up to batch ``stop``, and the cursor then."""
    cursor = settings["cursor"]
    loader = Loader(
        functools.partial(ShardSet, settings["folder"]), batches_of(settings), decode=number, stop=settings["stop"],
        num_workers=settings["workers"], cursor=None if cursor is None else Cursor.from_json(cursor),
        part=Part(settings["rank"], settings["ranks"]),
    )  # fmt: skip
    rows = []
    for batch in loader:
        rows += [(batch.n, *row) for row in zip(batch.keys, batch.items, batch.weights.tolist(), strict=True)]
        cursor = batch.after.to_json()
    return {"rows": rows, "cursor": cursor}


if __name__ == "__main__":
    print(json.dumps(read(json.loads(sys.argv[1]))))
