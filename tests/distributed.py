"""Run a function on N real ranks: processes of their own, gloo over loopback.

Slower than threads or a fake group, but what passes here has really been sent and received. Importing torch
and the model in every new rank took seconds a call, so ranks are kept: one pool a test process (and xdist
worker), forked from a server that has imported torch and computed nothing. It grows to `POOL_RANKS` ranks,
some 300 MB each, and a job of n ranks takes the first n. Each job has a process group and a store of its
own, so groups, timeouts and errors of one cannot reach the next. After any failure the pool is killed, since
its other ranks may be waiting for the one that failed, and the next job forks a new one.

What stays between the jobs of a rank is what its modules keep: a job that changes them (monkeypatching)
puts them back, or asks for ``fresh=True``.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

POOL_RANKS = 4
# Not the project's own packages: the server could find another copy of them than the test does.
_PRELOAD = [
    "torch", "torch.distributed.pipelining", "torch.distributed.checkpoint", "torch._subclasses.fake_tensor", "sympy",
    "pytest", "rich.console", "PIL.Image", "transformers.tokenization_utils_tokenizers",
]  # fmt: skip
_GRACE_S = 0.5  # for other ranks' reports once one has failed
_AFTER_DEATH_S = 20.0  # and once one has died


@dataclass(frozen=True)
class _Job:
    call: bytes  # (function, arguments), unpickled on the rank so that a failing import is that rank's error
    rank: int
    world_size: int
    store: str
    timeout_s: float


@dataclass(frozen=True)
class _Report:
    result: bytes = b""
    error: str = ""
    at: float = 0.0


def _serve(connection: Connection) -> None:
    """A rank's life: one job after another until the test process goes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        connection.send(_work(job))
        gc.collect()


def _work(job: _Job) -> _Report:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{job.store}",
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.timeout_s),
        )
        fn, args = pickle.loads(job.call)
        buffer = io.BytesIO()
        torch.save(fn(*args), buffer)
        dist.barrier()  # nobody leaves while others still send
        dist.destroy_process_group()
        return _Report(result=buffer.getvalue())
    except BaseException:
        return _Report(error=traceback.format_exc(), at=time.time())


class _Ranks:
    """Processes that wait for jobs."""

    def __init__(self) -> None:
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._processes: list[ForkServerProcess] = []
        self._connections: list[Connection] = []

    @property
    def pids(self) -> list[int | None]:
        return [process.pid for process in self._processes]

    def grow(self, count: int) -> None:
        """Start ranks until there are so many; all anew if one has died since the last job."""
        if not all(process.is_alive() for process in self._processes):
            self.kill()
        with _one_thread():
            while len(self._processes) < count:
                ours, theirs = self._context.Pipe()
                process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)

    def kill(self) -> None:
        """End all of them."""
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join()
            connection.close()
        self._processes, self._connections = [], []

    def run(self, call: bytes, world_size: int, timeout_s: float) -> list[Any]:
        """One job; the ranks' results. See `run_on_ranks` for what is raised; the ranks are then unusable."""
        end = time.monotonic() + timeout_s
        with tempfile.TemporaryDirectory() as folder:
            dead: set[int] = set()
            for rank in range(world_size):
                try:
                    job = _Job(call, rank, world_size, f"{folder}/store", timeout_s)
                    self._connections[rank].send(job)
                except BrokenPipeError:
                    dead.add(rank)
            reports: dict[int, _Report] = {}
            while len(reports) + len(dead) < world_size:
                if any(report.error for report in reports.values()):
                    end = min(end, time.monotonic() + _GRACE_S)
                if dead:  # the others notice by themselves, and may have something to say
                    end = min(end, time.monotonic() + _AFTER_DEATH_S)
                news = self._wait(set(range(world_size)) - set(reports) - dead, end)
                if not news:
                    break
                for rank, report in news.items():
                    if report is None:
                        dead.add(rank)
                    else:
                        reports[rank] = report
        for rank in sorted(dead):
            self._processes[rank].join()
            code = self._processes[rank].exitcode
            raise RuntimeError(f"rank {rank} of {world_size} died with exit code {code}")
        errors = [(report.at, rank, report.error) for rank, report in reports.items() if report.error]
        if errors:
            _, rank, text = min(errors)
            raise RuntimeError(f"rank {rank} of {world_size} failed:\n{text}")
        late = sorted(set(range(world_size)) - set(reports))
        if late:
            raise TimeoutError(f"ranks {late} of {world_size} did not finish within {timeout_s} s")
        return [torch.load(io.BytesIO(reports[rank].result), weights_only=False) for rank in range(world_size)]

    def _wait(self, ranks: set[int], end: float) -> dict[int, _Report | None]:
        """Reports that have come in by ``end``, None for a rank that died; empty if nothing happened."""
        by_connection = {self._connections[rank]: rank for rank in ranks}
        news: dict[int, _Report | None] = {}
        for ready in wait(list(by_connection), timeout=max(0.0, end - time.monotonic())):
            assert isinstance(ready, Connection)
            try:
                news[by_connection[ready]] = ready.recv()
            except (EOFError, ConnectionResetError):
                news[by_connection[ready]] = None
        return news


_pool = _Ranks()


@contextmanager
def _one_thread() -> Any:
    """OpenMP reads its number of threads once, when a process starts."""
    old = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if old is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = old


def run_on_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120, fresh: bool = False
) -> list[Any]:
    """Call ``fn(*args)`` on every rank of a gloo group; gives the ranks' results in order.

    Args:
        fn: a function at the top level of a module (it is pickled).
        timeout_s: for the whole run; all ranks are then killed.
        fresh: new processes for this call alone, where it spoils what it runs in. More ranks than
            `POOL_RANKS` are always fresh.

    Raises:
        RuntimeError: with rank and traceback of the first exception, or the exit code of a rank that died.
        TimeoutError: if the ranks did not finish.
    """
    ranks = _Ranks() if fresh or world_size > POOL_RANKS else _pool
    keep = False
    try:
        if ranks is not _pool and len(_pool.pids) + world_size > POOL_RANKS:
            _pool.kill()  # memory: never more than `POOL_RANKS` alive, or those of this call
        ranks.grow(world_size)
        results = ranks.run(pickle.dumps((fn, args)), world_size, timeout_s)
        keep = ranks is _pool
        return results
    finally:
        if not keep:
            ranks.kill()
