"""How far a job is: a bar with the time left, or where there is no terminal, a line now and then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SAY_EVERY_S = 30.0  # a log is looked at by somebody who wants to know whether it is alive


class Advance(Protocol):
    def __call__(self, count: int, /) -> None: ...


@contextmanager
def progress(console: Console, what: str, total: int, unit: str) -> Iterator[Advance]:
    """Gives what is told how many more are done.

    Args:
        what: is done, and ``unit``, of what: "embed", "documents".
    """
    said, done = time.monotonic(), 0
    first: tuple[float, int] | None = None  # when something was done for the first time, and how much
    with Progress(
        TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task(what, total=total)

        def advance(count: int) -> None:
            nonlocal said, done, first
            now, done = time.monotonic(), done + count
            bar.advance(task, count)
            first = first or (now, done)
            if not console.is_terminal and now - said > SAY_EVERY_S and done > first[1]:
                said, left = now, (now - first[0]) / (done - first[1]) * (total - done)
                console.print(f"{what}: {done} of {total} {unit}, {left:.0f} s left", highlight=False, soft_wrap=True)

        yield advance
