"""Real ranks and workers, over seeds and sizes of shards: together they read what the order says, from anywhere."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.data.loader_rank import batches_of
from tests.data.test_loader import slow_keys, write_tars

ROOT = Path(__file__).parents[2]


def on_ranks(count: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What each of ``count`` processes reads at the same time."""
    commands = [
        [sys.executable, "-m", "tests.data.loader_rank", json.dumps({**settings, "rank": rank, "ranks": count})]
        for rank in range(count)
    ]
    ranks = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for command in commands]
    found = [rank.communicate(timeout=280)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * count
    return [json.loads(text) for text in found]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_ranks_and_workers_read_the_order_and_go_on_as_others(seed: int, tmp_path: Path):
    """Each stretch on another number of ranks and workers, from the cursor of the stretch before."""
    draw = random.Random(seed)
    sizes = [draw.choice([0, 1, 1, 2, 5, 17]) for _ in range(draw.randint(1, 9))] + [draw.randint(8, 30)]
    folder, chunk = write_tars(tmp_path / "data", sizes), draw.randint(1, 5)
    keys = slow_keys(folder)
    settings: dict[str, Any] = {
        "folder": str(folder), "num": len(keys), "seed": draw.randrange(1 << 30), "chunk": chunk,
        "window": chunk * draw.randint(1, 6), "size": draw.choice([4, 8]),
        "tail": draw.choice(["wrap", "pad", "drop"]), "cursor": None, "stop": 0,
    }  # fmt: skip
    batches = batches_of(settings)
    for ranks, workers in draw.sample([(1, 3), (2, 0), (2, 1), (4, 0)], 2):
        start, settings["stop"] = settings["stop"], settings["stop"] + draw.randint(2, 9)
        done = on_ranks(ranks, {**settings, "workers": workers})
        for n in range(start, settings["stop"]):
            slots = batches.at(n)
            found = [tuple(row[1:]) for one in done for row in one["rows"] if row[0] == n]
            places, weights = slots.positions.tolist(), slots.weights.tolist()
            assert found == [(keys[place], place, weight) for place, weight in zip(places, weights, strict=True)]
        assert all(one["cursor"] == done[0]["cursor"] for one in done)  # any rank could write the checkpoint
        settings["cursor"] = done[0]["cursor"]
