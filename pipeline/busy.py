"""A machine as busy as in training, for a trace that one process makes.

Ranks on one machine share its caches, memory and clock, so a block that is timed alone looks 11 to 22 % too cheap.
Other processes of the same program trace it over and over while this one measures. It costs their start and their
memory: each builds the whole program.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

from pipeline.program import BlockProgram
from pipeline.trace import trace

Factory = Callable[[], tuple[BlockProgram, dict[str, Any], int]]


def num_busy(num_ranks: int) -> int:
    """How many of so many ranks this machine's cores can run at once, with this process's threads each."""
    return max(1, min(num_ranks, len(os.sched_getaffinity(0)) // torch.get_num_threads()))


class BusyRanks:
    """Within it, ``count`` other processes trace.

    Args:
        factory: pickled; gives program, batch and number of micro-batches.
        lineage_samples: as the trace that is disturbed.

    Raises:
        ValueError: on entering, if a process fails, which says how; on leaving, if one has died since, because then the
            times are of fewer busy ranks than asked for.
    """

    def __init__(self, factory: Factory, *, count: int, lineage_samples: int) -> None:
        self._factory, self._count, self._samples = factory, count, lineage_samples
        self._ranks: list[tuple[Any, Connection]] = []
        self._going = False

    def __enter__(self) -> BusyRanks:
        context = multiprocessing.get_context("spawn")
        for _ in range(self._count):
            ours, theirs = context.Pipe()
            arguments = (theirs, self._factory, self._samples, torch.get_num_threads())
            process = context.Process(target=_trace_again_and_again, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        for _, connection in self._ranks:
            try:
                error = connection.recv()
            except EOFError:
                error = "it died"
            if error:
                self.__exit__(None, None, None)
                raise ValueError(f"a busy rank beside the trace could not build the program: {error}")
        for _, connection in self._ranks:
            connection.send("go")
        self._going = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        dead = [process.exitcode for process, _ in self._ranks if not process.is_alive()]
        for process, connection in self._ranks:
            process.terminate()
            process.join()
            connection.close()
        self._ranks = []
        if dead and kind is None and self._going:
            raise ValueError(
                f"{len(dead)} of {self._count} busy ranks beside the trace ended with status {dead[0]}, so its times "
                "are too low; is there memory for all of them?"
            )


def _trace_again_and_again(connection: Connection, factory: Factory, lineage_samples: int, threads: int) -> None:
    """A busy rank's life; ends with the connection."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1), os.dup2(silent, 2)
    torch.set_num_threads(threads)
    try:
        program, batch, num_microbatches = factory()
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send("")
    connection.recv()
    while not connection.poll():
        trace(program, batch, num_microbatches=num_microbatches, lineage_samples=lineage_samples)
