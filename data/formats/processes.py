"""Pieces done by several processes, in an order that does not depend on them; the first error is the one by place.

Workers are started fresh (a fork of a process with threads may hang), leave interruptions to the process that started
them, and end when it has ended, however it did.
"""

from __future__ import annotations

import collections
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from typing import Any

from data.formats.common import Common
from data.formats.format import Piece
from data.formats.pieces import Job, convert

ENOUGH = 1000  # items after which the share of bad pictures is believed before the end

Progress = Callable[[str, float], None]
Begin = Callable[[Piece], "Future[dict[str, Any]]"]


@contextmanager
def pool(job: Job, workers: int, num_pieces: int) -> Iterator[Begin]:
    """Something that begins a piece and gives its future: in processes of their own, or at once in this one."""
    if workers == 1 or num_pieces == 1:
        yield lambda piece: _at_once(job, piece)
        return
    executor = ProcessPoolExecutor(min(workers, num_pieces), get_context("spawn"), initializer=_follow_parent)
    try:
        yield lambda piece: _submit(executor, job, piece)
    finally:
        executor.shutdown(cancel_futures=True)


def _submit(executor: ProcessPoolExecutor, job: Job, piece: Piece) -> Future[dict[str, Any]]:
    """Begin a piece. The first one starts the processes, which keep ^C blocked, as it is here while they start."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return executor.submit(convert, job, piece)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _at_once(job: Job, piece: Piece) -> Future[dict[str, Any]]:
    future: Future[dict[str, Any]] = Future()
    try:
        future.set_result(convert(job, piece))
    except ValueError as error:
        future.set_exception(error)
    return future


def _follow_parent() -> None:
    """End this process when the one that started it has ended, however it did."""
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def convert_all(
    run: Begin,
    pieces: Sequence[Piece],
    common: Common,
    progress: Progress,
    *,
    begin: float,
    total: int,
) -> dict[Piece, dict[str, Any]]:
    """Do the pieces; their records in order. The first error, by place, is the one that is raised."""
    records: dict[Piece, dict[str, Any]] = {}
    waiting: collections.deque[tuple[Piece, Future[dict[str, Any]]]] = collections.deque()
    rest = collections.deque(pieces)
    try:
        while rest or waiting:
            while rest and len(waiting) < 2 * common.workers:  # not all at once: an error stops those behind it
                waiting.append((rest[0], run(rest.popleft())))
            piece, future = waiting.popleft()
            records[piece] = future.result()
            check_bad(records.values(), common, at_end=False)
            progress(f"converting {piece.folder}", begin + 0.8 * len(records) / total)
    except BrokenProcessPool:
        raise RuntimeError(
            "a worker process died (out of memory?); the same command, with fewer --workers, goes on from here"
        ) from None
    check_bad(records.values(), common, at_end=True)
    return records


def check_bad(records: Iterable[dict[str, Any]], common: Common, *, at_end: bool) -> None:
    records = list(records)
    bad: collections.Counter[str] = collections.Counter()
    first: dict[str, str] = {}
    for record in records:
        bad.update(record["bad"])
        first = {**record["first"], **first}
    seen = sum(record["items"] for record in records) + bad.total()
    if bad and (at_end or seen >= ENOUGH) and bad.total() > common.max_bad_share * seen:
        reasons = "; ".join(f"{n} x {reason}, first {first[reason]}" for reason, n in sorted(bad.items()))
        raise ValueError(
            f"{bad.total()} of {seen} items cannot be used, more than --max-bad-share {common.max_bad_share:g} "
            f"allows: {reasons}"
        )
