"""How these benchmarks measure: real gloo ranks, one thread each, cases in turn, medians, results as JSON and a table.

Cases alternate round by round, so that a machine that slows down slows all of them; ratios are taken within a
round. A step takes as long as its slowest rank, from a barrier on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline import Profile, trace
from pipeline.costs import Link
from pipeline.program import BlockProgram

RESULTS = Path(__file__).parent / "results"


def options(name: str, description: str, *, pictures: bool = False) -> argparse.Namespace:
    """``--rounds``, ``--out`` and ``--note`` of a benchmark; ``--pictures`` of one that draws."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.pipeline.{name}", description=description)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each case (default 9)")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="where the results go")
    parser.add_argument("--note", default="", help="kept with the results, such as 'preliminary'")
    if pictures:
        parser.add_argument("--pictures", type=Path, help="folder for pictures of predicted and measured steps")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error(f"--rounds is {given.rounds}; it must be at least 1")
    return given


def machine() -> dict[str, Any]:
    """What the figures were measured on, and when."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "load_before": round(os.getloadavg()[0], 2),
        "date": datetime.now().strftime("%Y-%m-%d %H:%M"),
    }


def report(
    given: argparse.Namespace, results: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], title: str
) -> None:
    """Write ``results`` and ``rows`` as JSON and print the rows as a table."""
    given.out.parent.mkdir(parents=True, exist_ok=True)
    whole = {**results, "rounds": given.rounds, "note": given.note, "rows": list(rows)}
    given.out.write_text(json.dumps(whole, indent=2) + "\n")
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=140).print(table)
    print(f"written to {given.out}")


def busy_profile(
    program: BlockProgram, batch: Mapping[str, Tensor], *, num_microbatches: int, repeats: int = 9
) -> Profile:
    """Trace on all ranks at once, as they will compute; everybody gets rank 0's figures (a collective)."""
    dist.barrier()
    profile = trace(program, batch, num_microbatches=num_microbatches, repeats=repeats, lineage=False)
    box = [profile.to_json()]
    dist.broadcast_object_list(box, src=0)
    return Profile.from_json(box[0])


def measured_link(*, num_bytes: int = 1 << 22, repeats: int = 15) -> Link:
    """Latency and bandwidth between ranks 0 and 1 (half of a message and its answer), medians (a collective)."""
    medians = []
    for size in (1, num_bytes):
        tensor, times = torch.zeros(size, dtype=torch.uint8), []
        for _ in range(repeats):
            dist.barrier()
            start = time.perf_counter()
            if dist.get_rank() == 0:
                dist.send(tensor, 1)
                dist.recv(tensor, 1)
            elif dist.get_rank() == 1:
                dist.recv(tensor, 0)
                dist.send(tensor, 0)
            times.append((time.perf_counter() - start) / 2)
        medians.append(statistics.median(times))
    box = [(medians[0], num_bytes / max(medians[1] - medians[0], 1e-9))]
    dist.broadcast_object_list(box, src=0)
    return Link(*box[0])


def in_turn(cases: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds of each case in each round, the slowest rank's (a collective).

    Every round begins with another case: what one leaves behind (caches, a rank that was idle) is not always
    another's.
    """
    names = list(cases)
    times: dict[str, list[float]] = {name: [] for name in cases}
    for round_ in range(warmup + rounds):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            start = time.perf_counter()
            cases[name]()
            took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if round_ >= warmup:
                times[name].append(float(took))
    return times


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median over rounds of the ratio within the round."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


class LiveBytes(TorchDispatchMode):
    """Bytes of tensors made within and alive, and the most there were: each storage once, no fake tensors.

    What an operation allocates for itself and frees again is not in it, nor what existed before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                if id(storage) not in given and id(storage) not in self._known:
                    self._add(storage)
        return result

    def _add(self, storage: Any) -> None:
        size, key = storage.nbytes(), id(storage)

        def freed(_: Any) -> None:
            self.now -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)
