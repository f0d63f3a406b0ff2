"""Events of a step, predicted or measured, and the trace file that shows them.

Kinds: ``forward``, ``backward`` and ``backward_weight`` (computed by ``stage``), ``send`` and ``send_gradient``
(from ``stage``), and ``reduce`` (tied parameters over all ranks; ``stage`` is the rank's first). Stage s is on rank
``s % num_ranks``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Event:
    """One span of time (seconds from the start of the step) of a stage and a micro-batch."""

    kind: str
    stage: int
    microbatch: int
    start_s: float
    end_s: float


def is_send(event: Event) -> bool:
    return event.kind.startswith("send")


def is_computing(event: Event) -> bool:
    return event.kind in ("forward", "backward", "backward_weight")


def from_zero(events: Sequence[Event]) -> list[Event]:
    """The same events, the first one starting at 0."""
    start = min((e.start_s for e in events), default=0.0)
    return [replace(e, start_s=e.start_s - start, end_s=e.end_s - start) for e in events]


def length(events: Sequence[Event]) -> float:
    """Seconds from the first start to the last end."""
    return max((e.end_s for e in events), default=0.0) - min((e.start_s for e in events), default=0.0)


def idle_share(events: Sequence[Event], *, num_ranks: int) -> float:
    """Share of all ranks' time in which nothing is computed."""
    busy = sum(e.end_s - e.start_s for e in events if is_computing(e))
    whole = num_ranks * length(events)
    return 1.0 - busy / whole if whole else 0.0


def write_perfetto(path: str | Path, runs: Mapping[str, Sequence[Event]], *, num_ranks: int) -> None:
    """Write a Chrome trace (JSON) that ui.perfetto.dev and chrome://tracing open.

    Args:
        runs: events by title (``predicted``, ``measured``); each becomes a group with a row a rank, and one with
            two rows for each rank's messages, forward and back, if there are any.

    Raises:
        OSError: if the file cannot be written.
    """
    rows: list[dict[str, Any]] = []
    for number, (title, events) in enumerate(runs.items()):
        computed = [e for e in events if not is_send(e)]
        rows += _names(2 * number, f"{title}: ranks", [f"rank {rank}" for rank in range(num_ranks)])
        rows += [_row(e, 2 * number, e.stage % num_ranks) for e in computed]
        sent = [e for e in events if is_send(e)]
        if sent:
            titles = [f"rank {rank} {what}" for rank in range(num_ranks) for what in ("sends", "sends gradients")]
            rows += _names(2 * number + 1, f"{title}: messages", titles)
            rows += [_row(e, 2 * number + 1, 2 * (e.stage % num_ranks) + (e.kind == "send_gradient")) for e in sent]
    Path(path).write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}))


def _names(pid: int, title: str, rows: Sequence[str]) -> list[dict[str, Any]]:
    process = {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": title}}
    threads = [
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
        for tid, name in enumerate(rows)
    ]
    return [process, *threads]


def _row(event: Event, pid: int, tid: int) -> dict[str, Any]:
    return {
        "name": f"{event.kind} {event.microbatch}",
        "cat": event.kind,
        "ph": "X",
        "ts": event.start_s * 1e6,
        "dur": (event.end_s - event.start_s) * 1e6,
        "pid": pid,
        "tid": tid,
        "args": {"stage": event.stage, "microbatch": event.microbatch},
    }


def write_timeline(path: str | Path, runs: Mapping[str, Sequence[Event]], *, num_ranks: int) -> None:
    """Show runs of a step on one time axis: a picture (.png, .svg) or a trace for Perfetto (.json).

    Args:
        runs: events by title; drawn from top to bottom.

    Raises:
        ValueError: if the file's ending is another.
        OSError: if the file cannot be written.
    """
    ending = Path(path).suffix
    if ending == ".json":
        write_perfetto(path, runs, num_ranks=num_ranks)
    elif ending in (".png", ".svg"):
        from pipeline.picture import draw  # matplotlib takes a second to import, and few need it

        draw(path, runs, num_ranks=num_ranks)
    else:
        raise ValueError(f"timeline file {str(path)!r} ends in {ending!r}; allowed: .png, .svg, .json")
