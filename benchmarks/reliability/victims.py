"""Processes to be killed: runs of ``train.py`` and of ``data.prepare``, launched whole or forked from a loaded parent.

Starting Python with torch takes seconds, so most kills hit processes that are forked from one that has
imported everything and computed nothing; they run the same ``main``. Ranks get the environment that
`rag_mm.launch` gives them. Every victim leads a process group of its own, and what it says goes to a file.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass
class Victim:
    """Processes of one run; the first may be a launcher of the others.

    Attributes:
        pids: of the processes that were started here, by which the run is waited for.
        log: what they said, and what earlier starts did.
    """

    pids: list[int]
    log: Path
    launched: bool
    said_before: int = 0
    _statuses: dict[int, int] = field(default_factory=dict, repr=False)

    def ranks(self) -> list[int]:
        """Process ids of the ranks, as far as they have been started."""
        if not self.launched:
            return list(self.pids)
        (launcher,) = self.pids
        try:
            children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        except OSError:
            return []
        return [int(pid) for pid in children]

    def poll(self) -> list[int | None]:
        """Exit status of each process (negative: a signal), None while it runs."""
        for pid in self.pids:
            if pid not in self._statuses:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self._statuses[pid] = os.waitstatus_to_exitcode(status)
        return [self._statuses.get(pid) for pid in self.pids]

    def running(self) -> bool:
        return any(status is None for status in self.poll())

    def kill(self, pids: Sequence[int]) -> None:
        """SIGKILL; what is gone already is left alone."""
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def wait(self, *, limit_s: float) -> float:
        """Seconds until all processes, ranks too, have ended; those left after ``limit_s`` are killed, which raises."""
        begun, ranks = time.monotonic(), self.ranks()
        while self.running() or any(_alive(pid) for pid in ranks):
            if time.monotonic() - begun > limit_s:
                self.kill([*self.pids, *ranks])
                raise TimeoutError(f"processes were still there {limit_s:g} s after one had died; see {self.log}")
            time.sleep(0.01)
        return time.monotonic() - begun


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def left_of(run: Path, *, limit_s: float) -> list[str]:
    """Command lines of processes that still work for a run some time after it has ended."""
    end = time.monotonic() + limit_s
    while True:
        left = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                words = (place / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if any(word == str(run) or word.startswith(f"{run}/") for word in words) and _alive(int(place.name)):
                left.append(" ".join(words))
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.05)


def launch(argv: Sequence[str], log: Path) -> Victim:
    """``python train.py *argv``, as a user starts it."""
    said_before = _size(log)
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(ROOT / "train.py"), *argv],
            cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    return Victim([process.pid], log, launched=True, said_before=said_before)


def fork_ranks(argv: Sequence[str], log: Path, *, num_ranks: int, store: Path) -> Victim:
    """The ranks of ``train.py *argv``, forked from this process, which must have computed nothing."""
    store.unlink(missing_ok=True)
    pids, said_before = [], _size(log)
    for rank in range(num_ranks):
        environment = {
            "RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank),
            "RAG_MM_STORE": str(store), "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        pids.append(fork(_train, argv, log=log, environment=environment if num_ranks > 1 else {}))
    return Victim(pids, log, launched=False, said_before=said_before)


def _size(log: Path) -> int:
    return len(log.read_text(errors="replace")) if log.exists() else 0


def _train(argv: Sequence[str]) -> int:
    from rag_mm.entry import main

    return main(argv)


def fork(main: Callable[[Sequence[str]], int], argv: Sequence[str], *, log: Path, environment: dict[str, str]) -> int:
    """Run ``main(argv)`` in a forked process; gives its id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)  # a test's may be others
        os.environ.update(environment)
        try:
            status = main(argv)
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def preload() -> None:
    """Import what the victims need, in the parent."""
    for name in (
        "faiss", "torch.distributed.checkpoint", "torch.distributed.pipelining", "torch.utils.tensorboard",
        "transformers", "data.prepare", "rag_mm.entry",
    ):  # fmt: skip
        importlib.import_module(name)
