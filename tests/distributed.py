"""Run a function on N real ranks: processes of their own, gloo over loopback.

Slower than threads or a fake group, but what passes here has really been sent and received. Ranks are
forked from a server that has imported torch once a session (and computed nothing, so no thread is lost
in the fork); importing it anew in every rank was most of the time of these tests.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_PRELOAD = ["torch", "torch.distributed.pipelining", "torch._subclasses.fake_tensor", "sympy"]


def _rank_main(rank: int, world_size: int, folder: str, timeout_s: float, fn: Callable[..., Any], args: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    place = Path(folder)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        result = fn(*args)
        torch.save(result, place / f"{rank}.tmp")
        (place / f"{rank}.tmp").rename(place / f"{rank}.result")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        # Written before this process ends, so that peers failing on the lost connection come second.
        (place / f"{rank}.tmp").write_text(f"{time.time()}\n{traceback.format_exc()}")
        (place / f"{rank}.tmp").rename(place / f"{rank}.error")
        raise SystemExit(1) from None


def run_on_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """Call ``fn(*args)`` on every rank of a gloo group; gives the ranks' results in order.

    Args:
        fn: a function at the top level of a module (it is pickled).
        timeout_s: for the whole run; ranks still going are then terminated.

    Raises:
        RuntimeError: with rank and traceback of the first exception.
        TimeoutError: if the ranks did not finish.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        ranks = [
            context.Process(target=_rank_main, args=(rank, world_size, folder, timeout_s, fn, args), daemon=True)
            for rank in range(world_size)
        ]
        old = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS",)}
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            for process in ranks:
                process.start()
        finally:
            for name, value in old.items():
                os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
        end = time.monotonic() + timeout_s
        try:
            while any(process.is_alive() for process in ranks) and time.monotonic() < end:
                if list(place.glob("*.error")) or any(p.exitcode not in (None, 0) for p in ranks):
                    time.sleep(0.5)  # let the others report too
                    break
                time.sleep(0.02)
            alive = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
        errors = []
        for path in place.glob("*.error"):
            when, _, text = path.read_text().partition("\n")
            errors.append((float(when), int(path.stem), text))
        if errors:
            _, rank, text = min(errors)
            raise RuntimeError(f"rank {rank} of {world_size} failed:\n{text}")
        died = [(rank, p.exitcode) for rank, p in enumerate(ranks) if p.exitcode != 0 and rank not in alive]
        if died:
            raise RuntimeError(f"rank {died[0][0]} of {world_size} died with exit code {died[0][1]}")
        if alive:
            raise TimeoutError(f"ranks {alive} of {world_size} did not finish within {timeout_s} s")
        return [torch.load(place / f"{rank}.result", weights_only=False) for rank in range(world_size)]
