"""Real ranks and workers, over seeds and sizes of shards: together they read what the order says, from anywhere."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from data.cursor import Batches, Cursor
from data.loader import Loader, Part
from data.order import Order
from data.shard_set import ShardSet
from tests.data.test_loader import number, slow_keys, write_tars
from tests.distributed import run_on_ranks

Row = tuple[int, str, int | None, float]  # batch, key, what stands in the sample, weight


def stretch(
    folder: Path, settings: dict[str, Any], cursor: dict[str, Any] | None, stop: int, workers: int
) -> tuple[list[Row], dict[str, Any]]:
    """What this rank reads up to batch ``stop``, and the cursor then."""
    order = Order(settings["num"], "f", settings["seed"], chunk=settings["chunk"], window=settings["window"])
    batches = Batches(order, settings["size"], settings["tail"])
    loader = Loader(
        functools.partial(ShardSet, folder), batches, decode=number, stop=stop, num_workers=workers,
        cursor=None if cursor is None else Cursor.from_json(cursor), part=Part(dist.get_rank(), dist.get_world_size()),
    )  # fmt: skip
    found: list[Row] = []
    for batch in loader:
        found += [(batch.n, *row) for row in zip(batch.keys, batch.items, batch.weights.tolist(), strict=True)]
        cursor = batch.after.to_json()
    loader.close()
    assert cursor is not None
    return found, cursor


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 14))])
def test_ranks_and_workers_read_the_order_and_go_on_as_others(seed: int, tmp_path: Path):
    """Each stretch on another number of ranks and workers, from the cursor of the stretch before."""
    draw = random.Random(seed)
    sizes = [draw.choice([0, 1, 1, 2, 5, 17]) for _ in range(draw.randint(1, 9))] + [draw.randint(8, 30)]
    folder = write_tars(tmp_path / "data", sizes)
    keys, chunk = slow_keys(folder), draw.randint(1, 5)
    settings = {
        "num": len(keys), "seed": draw.randrange(1 << 30), "chunk": chunk, "window": chunk * draw.randint(1, 6),
        "size": draw.choice([4, 8]), "tail": draw.choice(["wrap", "pad", "drop"]),
    }  # fmt: skip
    batches = Batches(
        Order(len(keys), "f", settings["seed"], chunk=chunk, window=settings["window"]),
        settings["size"],
        settings["tail"],
    )
    cursor, start = None, 0
    for ranks, workers in ((2, 0), (1, 2), (2, 1)):
        stop = start + draw.randint(2, 9)
        done = run_on_ranks(stretch, ranks, folder, settings, cursor, stop, workers)
        assert all(after == done[0][1] for _, after in done)  # every rank could write the checkpoint
        for n in range(start, stop):
            slots = batches.at(n)
            found = [row[1:] for rows, _ in done for row in rows if row[0] == n]
            places, weights = slots.positions.tolist(), slots.weights.tolist()
            assert found == [(keys[place], place, weight) for place, weight in zip(places, weights, strict=True)]
        cursor, start = done[0][1], stop
