"""A step as a picture: one row a rank, forward and backward passes in their stage's colour, the bubble hatched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pipeline.timeline import Event, from_zero, idle_share, is_send, length

# Okabe and Ito's colours, which people with colour blindness can tell apart.
STAGE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#b8860b", "#7f5fc4", "#5c5c5c")
IDLE, REDUCE, SENDING = "#ececec", "#333333", "#8a8a8a"
_FORWARD_TINT = 0.55  # share of white in a forward's colour
_WEIGHT_SHADE = 0.6  # brightness of the backward of parameters, where it is apart
_BAR, _SENDING_BAR = 0.74, 0.09


def draw(path: str | Path, runs: Mapping[str, Sequence[Event]], *, num_ranks: int) -> None:
    """Draw runs of a step above each other on one time axis, as the path's ending says.

    Args:
        runs: events by title (``predicted``, ``measured``).

    Raises:
        ValueError: if there is nothing to draw.
        OSError: if the file cannot be written.
    """
    if not runs or not all(runs.values()):
        raise ValueError("there are no events to draw; record a step or simulate one")
    shown = {title: from_zero(events) for title, events in runs.items()}
    longest = max(length(events) for events in shown.values())
    num_stages = 1 + max(e.stage for events in shown.values() for e in events)
    height = 1.15 + len(shown) * (0.72 + 0.52 * num_ranks)
    figure = Figure(figsize=(11, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, events) in zip(panels, shown.items(), strict=True):
        _panel(axes, title, events, num_ranks=num_ranks, num_stages=num_stages, longest=longest)
    panels[-1].set_xlabel("milliseconds")
    handles = _legend(shown, num_stages=num_stages)
    columns = min(6, len(handles))
    by_row = [handle for column in range(columns) for handle in handles[column::columns]]  # it fills columns first
    figure.legend(handles=by_row, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _panel(axes: Any, title: str, events: Sequence[Event], *, num_ranks: int, num_stages: int, longest: float) -> None:
    whole = length(events)
    bubble = idle_share(events, num_ranks=num_ranks)
    axes.set_title(f"{title}: step {whole * 1e3:.1f} ms, bubble {bubble:.1%}", loc="left", fontsize=11)
    for rank in range(num_ranks):
        axes.barh(rank, whole * 1e3, height=_BAR, color=IDLE, edgecolor="#c4c4c4", hatch="////", linewidth=0, zorder=1)
    for event in events:
        rank = event.stage % num_ranks
        start, took = event.start_s * 1e3, (event.end_s - event.start_s) * 1e3
        if is_send(event):
            place = rank + _BAR / 2 + (0.06 if event.kind == "send" else 0.06 + _SENDING_BAR)
            axes.barh(place, took, left=start, height=_SENDING_BAR * 0.8, color=SENDING, linewidth=0, zorder=2)
            continue
        axes.barh(rank, took, left=start, height=_BAR, color=_colour(event), edgecolor="white", linewidth=0.6, zorder=3)
        if event.kind != "reduce" and took > longest * 1e3 * (0.011 + 0.007 * (len(str(event.microbatch)) - 1)):
            axes.text(
                start + took / 2, rank, str(event.microbatch), ha="center", va="center", fontsize=8, zorder=4,
                color="#1a1a1a" if event.kind == "forward" else "white",
            )  # fmt: skip
    axes.set_yticks(range(num_ranks), [_row_name(rank, num_ranks, num_stages) for rank in range(num_ranks)])
    axes.set_ylim(num_ranks - 0.45, -0.5)
    axes.set_xlim(0, longest * 1e3 * 1.005)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _row_name(rank: int, num_ranks: int, num_stages: int) -> str:
    stages = [str(s) for s in range(rank, num_stages, num_ranks)]
    return f"rank {rank}" if num_stages == num_ranks else f"rank {rank}\nstages {', '.join(stages)}"


def _colour(event: Event) -> tuple[float, float, float]:
    if event.kind == "reduce":
        return to_rgb(REDUCE)
    full = to_rgb(STAGE_COLOURS[event.stage % len(STAGE_COLOURS)])
    if event.kind == "backward":
        return full
    if event.kind == "backward_weight":
        dark, green, blue = (c * _WEIGHT_SHADE for c in full)
        return dark, green, blue
    red, green, blue = (c + (1 - c) * _FORWARD_TINT for c in full)
    return red, green, blue


def _legend(shown: Mapping[str, Sequence[Event]], *, num_stages: int) -> list[Patch]:
    kinds = {e.kind for events in shown.values() for e in events}
    named = min(num_stages, len(STAGE_COLOURS))
    handles = [Patch(color=STAGE_COLOURS[s], label=f"stage {s}") for s in range(named)]
    grey = Event("forward", STAGE_COLOURS.index("#5c5c5c"), 0, 0.0, 0.0)
    handles.append(Patch(color=_colour(grey), label="forward (light)"))
    handles.append(Patch(color=STAGE_COLOURS[-1], label="backward (dark)"))
    if "backward_weight" in kinds:
        handles.append(Patch(color=_colour(replace(grey, kind="backward_weight")), label="of parameters (darker)"))
    if "reduce" in kinds:
        handles.append(Patch(color=REDUCE, label="tied parameters"))
    if kinds & {"send", "send_gradient"}:
        handles.append(Patch(color=SENDING, label="sending (below the row)"))
    handles.append(Patch(facecolor=IDLE, edgecolor="#c4c4c4", hatch="////", label="idle"))
    return handles
