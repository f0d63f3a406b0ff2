"""How far a trace is, as a progress bar on stderr.

It is drawn only between blocks: a thread that redraws it would take time from what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


@contextmanager
def trace_bar(console: Console | None = None) -> Iterator[Callable[[int, int, str], None]]:
    """What `trace` takes as ``progress``. A bar on a terminal, nothing elsewhere; why a trace is not cached is said
    everywhere.

    Args:
        console: stderr by default; a quiet one for ranks that say nothing.
    """
    console = console or Console(stderr=True)
    columns = TextColumn("tracing blocks"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, disable=not console.is_terminal, auto_refresh=False) as bar:
        task = bar.add_task("", total=None)

        def progress(done: int, total: int, name: str) -> None:
            if name.startswith("not cached"):
                console.print(f"trace {name}", highlight=False, markup=False, soft_wrap=True)
            else:
                bar.update(task, completed=done, total=total, description=name, refresh=True)

        yield progress
