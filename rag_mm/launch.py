"""Starting ranks: those that torchrun gives, or local ones of our own.

Under torchrun the ranks are there already. Alone, ``launch`` starts as many local processes as the layout
needs, on gloo over loopback, passes SIGTERM and SIGINT on to them, and when one dies says which and ends the
others. Exit statuses of the ranks: 0 done, 75 interrupted and checkpointed, anything else failed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from pipeline.heap import keep_freed_memory
from pipeline.roll_call import LostRankError, RollCall

EXIT_FAILED, EXIT_USER, EXIT_INTERRUPTED = 1, 2, 75
AFTER_INTERRUPTION_S = 30.0  # for a rank to end after another one did
NOTHING_LOST = "interrupted before there was anything to save; run the same command to go on"


def is_rank() -> bool:
    """Whether this process is one of several ranks (torchrun's or ours)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def join(*, timeout_s: int, threads: int) -> RollCall | None:
    """Join the other ranks, if there are any; gives what names those of them that die.

    Raises:
        LostRankError: the others could not be reached.
    """
    torch.set_num_threads(threads)
    keep_freed_memory()
    if "RAG_MM_STORE" in os.environ:
        _end_with_the_launcher()
    if not is_rank() or int(os.environ["WORLD_SIZE"]) == 1:
        return None
    rank, world, timeout = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=timeout_s)
    try:
        store = _store(rank, world, timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        group = dist.group.WORLD
        assert group is not None
        return RollCall(group, what="run")
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        raise LostRankError(
            f"rank {rank} of {world} could not join the others, one of them may have died: {text}"
        ) from error


def watched(roll_call: RollCall | None) -> contextlib.AbstractContextManager[None]:
    """Within it, the error of a lost connection names the rank that died."""
    return contextlib.nullcontext() if roll_call is None else roll_call.names_the_dead()


def _store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Where the ranks find each other: our launcher's file, or torchrun's store.

    When torchrun starts ranks again after one died, it may give them the store of the ranks before, whose
    addresses are in it: each attempt gets names of its own.
    """
    if "RAG_MM_STORE" in os.environ:
        return dist.FileStore(os.environ["RAG_MM_STORE"], world_size)
    store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
    return dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _end_with_the_launcher() -> None:
    """Ask the kernel for SIGTERM when the launcher dies: a rank of ours must not train on by itself."""
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() == 1:  # it died before we asked
        os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def only_one(run_dir: Path) -> Iterator[None]:
    """Hold the run folder for this process.

    Raises:
        ValueError: if another process trains in it, or it cannot be written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / ".lock").open("a+")
    except OSError as error:
        raise ValueError(f"run_dir is {str(run_dir)!r}, which cannot be written ({error.strerror})") from error
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise ValueError(
                f"{run_dir} is in use by process {file.read().strip() or '?'}; wait for it, end it, or use another "
                "--run-dir"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def leave() -> None:
    """Leave the group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def launch(argv: Sequence[str], *, num_ranks: int, module: str = "rag_mm.entry") -> int:
    """Run ``python -m module *argv`` on ``num_ranks`` local processes; gives the common exit status."""
    with tempfile.TemporaryDirectory(prefix="rag_mm-") as folder:
        store = Path(folder) / "store"
        processes = [_start(module, argv, rank, num_ranks, store) for rank in range(num_ranks)]

        asked: list[float] = []  # when

        def forward(number: int, frame: FrameType | None) -> None:
            asked.append(time.monotonic())
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)

        previous = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            return _wait(processes, asked)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _start(module: str, argv: Sequence[str], rank: int, num_ranks: int, store: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank),
        "RAG_MM_STORE": str(store), "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }  # fmt: skip
    # A session of its own: an interrupt from the terminal reaches the launcher alone, which passes it on once.
    return subprocess.Popen([sys.executable, "-m", module, *argv], env=environment, start_new_session=True)


def _wait(processes: Sequence[subprocess.Popen[bytes]], asked: Sequence[float]) -> int:
    """Wait for all; when one fails, give the others a moment to report and end them.

    Args:
        asked: when an interruption was passed on; fills while this waits.
    """
    ended_early: float | None = None
    while True:
        statuses = [process.poll() for process in processes]
        if all(status is not None for status in statuses):
            break
        # Ranks that still import or look for each other have no handler yet, or do not come to run it.
        fine = (None, 0, EXIT_INTERRUPTED, *([-signal.SIGTERM] if asked else []))
        if any(status not in fine for status in statuses):
            _end(processes, seconds=2.0)
            break
        if asked and ended_early is None and any(status not in (None, 0) for status in statuses):
            ended_early = time.monotonic()
        if ended_early is not None and time.monotonic() - ended_early > AFTER_INTERRUPTION_S:
            _end(processes, seconds=0.0)
            break
        time.sleep(0.05)
    final = [process.wait() for process in processes]
    if asked and all(status in (0, EXIT_INTERRUPTED, -signal.SIGTERM, None) for status in statuses) and any(final):
        if EXIT_INTERRUPTED not in final:
            print(NOTHING_LOST, file=sys.stderr)
        return EXIT_INTERRUPTED
    # The rank that failed by itself, not one that was ended or lost its peer afterwards.
    first = next((rank for rank, s in enumerate(statuses) if s not in (None, 0, EXIT_INTERRUPTED)), None)
    if first is None:
        return max(final)
    status = statuses[first]
    assert status is not None
    if status == EXIT_USER:
        return EXIT_USER
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"failed with exit status {status}"
    print(f"rank {first} of {len(processes)} {how}; the others were stopped", file=sys.stderr)
    return EXIT_FAILED


def _end(processes: Sequence[subprocess.Popen[bytes]], *, seconds: float) -> None:
    """Kill those that have not ended by themselves in that time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.05)
    for process in processes:
        if process.poll() is None:
            process.kill()


class Interrupt:
    """Remembers SIGTERM and SIGINT, so that a step can finish and be checkpointed first; further ones change nothing.

    Args:
        at_once: end the process instead, as there is nothing to save yet: starting may take minutes.

    Attributes:
        asked: whether one has come.
        at_once: as above; may be changed.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self.asked, self.at_once = False, at_once
        self._previous: dict[int, Callable[..., object] | int | None] = {}

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self.at_once:
            if os.environ.get("RANK", "0") == "0":
                os.write(2, f"{NOTHING_LOST}\n".encode())  # not print: the signal may have come amid one
            os._exit(EXIT_INTERRUPTED)

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
