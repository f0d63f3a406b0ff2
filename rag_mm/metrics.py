"""What a run says of itself: ``metrics.jsonl``, TensorBoard events and a live line on the terminal."""

from __future__ import annotations

import contextlib
import json
import math
import resource
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from rag_mm.line_file import LineFile


def peak_memory_bytes() -> int:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class MetricsWriter:
    """Appends one line a step, after cutting the file back to ``start_step`` (a resumed run has each step once).

    A line that cannot be written (a full disk) does not end training: it waits for the next one (`LineFile`).
    TensorBoard events, which say the same, are given up after the first that cannot be written.

    Attributes:
        events_problem: why events are no longer written, or None.

    Raises:
        ValueError: if ``metrics.jsonl`` is damaged before its last line; names it.
        OSError: if the files cannot be written; they are then as they were.
    """

    def __init__(self, run_dir: Path, *, start_step: int) -> None:
        kept = [line for line in read_metrics(run_dir) if line["step"] <= start_step]
        self._file = LineFile(run_dir / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept))
        self.path = self._file.path
        self.events_problem: str | None = None
        self._hook = threading.excepthook
        threading.excepthook = self._unless_of_events
        self._events = SummaryWriter(str(run_dir / "events"), purge_step=start_step + 1 if start_step else None)

    @property
    def problem(self) -> str | None:
        """Why lines are waiting, or None."""
        return self._file.problem

    def write(self, record: dict[str, Any]) -> None:
        """Write one step; numbers that are not finite become null."""
        self._file.append(json.dumps(_finite(record)))
        if self.events_problem is None:
            try:
                for name, value in _flat(record):
                    if isinstance(value, int | float) and name != "step":
                        self._events.add_scalar(name, value, record["step"])
            except OSError as error:  # of the thread that writes them, some steps ago
                self.events_problem = str(error)

    def _unless_of_events(self, what: threading.ExceptHookArgs) -> None:
        """Leave out the trace of TensorBoard's thread on a full disk: `write` finds its error and says it."""
        if not (issubclass(what.exc_type, OSError) and type(what.thread).__name__ == "_AsyncWriterThread"):
            self._hook(what)

    def flush(self) -> None:
        """Write the lines that wait.

        Raises:
            OSError: if that is not possible.
        """
        self._file.flush()

    def sync(self) -> None:
        """Make what is written durable; may run beside the steps.

        Raises:
            OSError: if that is not possible.
        """
        self._file.sync()

    def close(self) -> None:
        try:
            self._file.close()
        finally:
            with contextlib.suppress(OSError):  # they say nothing that metrics.jsonl does not
                self._events.close()
            threading.excepthook = self._hook


class Window:
    """What the steps since the last checkpoint were like."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._records: list[dict[str, Any]] = []
        self._any_taken = False

    def add(self, record: dict[str, Any], *, taken: bool) -> None:
        self._records.append({name: record[name] for name in ("loss", "hit_at_k", "token_accuracy")})
        self._any_taken |= taken

    @property
    def good(self) -> bool:
        """Whether a step was taken and all losses were finite."""
        return self._any_taken and all(math.isfinite(record["loss"]) for record in self._records)

    def means(self) -> dict[str, float]:
        """Of each metric over the steps that have it."""
        means = {}
        for name in ("loss", "hit_at_k", "token_accuracy"):
            values = [record[name] for record in self._records if record[name] is not None]
            if values and all(map(math.isfinite, values)):
                means[name] = sum(values) / len(values)
        return means


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``; a last line that was cut off by a crash is left out.

    Raises:
        ValueError: if another line is not what was written; names it.
    """
    path = Path(run_dir) / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line) if line else None
            if line and not (isinstance(record, dict) and isinstance(record.get("step"), int)):
                raise ValueError("no step")
        except (ValueError, RecursionError):
            if number < len(lines):
                raise ValueError(
                    f"{path} is damaged: line {number} is not a step's; restore the file, or remove that line and "
                    "those after it"
                ) from None
            continue
        if record is not None:
            records.append(record)
    return records


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat(record: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    items = []
    for name, value in record.items():
        items += _flat(value, f"{prefix}{name}/") if isinstance(value, dict) else [(prefix + name, value)]
    return items


class LiveLine:
    """A progress bar with loss, hit@k and speed on a terminal; a line every ten seconds elsewhere."""

    def __init__(self, console: Console, *, title: str, start: int, steps: int) -> None:
        self.console, self.title, self.steps = console, title, steps
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[live]}"), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task(title, total=steps, completed=start, live="")
        self._said = time.monotonic()

    def __enter__(self) -> LiveLine:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, record: dict[str, Any]) -> None:
        """Show one step's record."""
        parts = [f"loss {record['loss']:.3f}"]
        if record["hit_at_k"] is not None:
            parts.append(f"hit@k {record['hit_at_k']:.2f}")
        if record["token_accuracy"] is not None:
            parts.append(f"token accuracy {record['token_accuracy']:.2f}")
        parts.append(f"{record['samples_per_s']:.0f} samples/s")
        self._bar.update(self._task, completed=record["step"], live="  ".join(parts))
        if not self.console.is_terminal and time.monotonic() - self._said > 10:
            self._said = time.monotonic()
            line = f"{self.title}  step {record['step']}/{self.steps}  " + "  ".join(parts)
            self.console.print(line, highlight=False, soft_wrap=True)
