"""Traces and pictures of a step: what is in them, and that they are the files they say."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image

from pipeline import partition, simulate
from pipeline.costs import Link
from pipeline.simulate import Event, Simulation
from pipeline.timeline import idle_share, write_timeline
from tests.pipeline.profiles import random_profile


def interleaved_run() -> Simulation:
    """Three ranks, so that one sends forward and back at once, over links that are slow enough for that."""
    profile = random_profile(6, 6, random.Random(0))
    plan = partition(profile, num_stages=6, num_ranks=3, schedule="interleaved", num_microbatches=6)
    return simulate(profile, plan, link=Link(1.5, 1e4))


def test_perfetto_rows_hold_every_event_and_never_overlap(tmp_path: Path) -> None:
    run = interleaved_run()
    later = tuple(Event(e.kind, e.stage, e.microbatch, e.start_s + 7, e.end_s + 7) for e in run.events)
    write_timeline(tmp_path / "t.json", {"predicted": run.events, "measured": later}, num_ranks=3)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 2 * len(run.events)
    titles = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert titles == ["predicted: ranks", "predicted: messages", "measured: ranks", "measured: messages"]
    for row in {(e["pid"], e["tid"]) for e in spans}:
        mine = sorted((e["ts"], e["dur"]) for e in spans if (e["pid"], e["tid"]) == row)
        assert all(a + took <= b + 1e-3 for (a, took), (b, _) in pairwise(mine))
    forward = [e for e in spans if e["pid"] == 0 and e["cat"] == "forward"]
    assert {e["tid"] for e in forward} == {0, 1, 2} and len(forward) == 6 * 6


def test_idle_share_is_the_simulation_s_bubble() -> None:
    run = interleaved_run()
    assert idle_share(run.events, num_ranks=3) == pytest.approx(run.bubble)


@pytest.mark.parametrize("ending", [".png", ".svg"])
def test_pictures(tmp_path: Path, ending: str) -> None:
    run, path = interleaved_run(), tmp_path / f"step{ending}"
    write_timeline(path, {"predicted": run.events, "measured": run.events}, num_ranks=3)
    if ending == ".png":
        with Image.open(path) as picture:
            assert picture.format == "PNG" and picture.width > 1000
            colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 24)}
        assert {
            (0, 114, 178),
            (213, 94, 0),
            (0, 158, 115),
            (204, 121, 167),
        } <= colours  # backward of the first four stages
    else:
        text = path.read_text()
        assert "<svg" in text and text.count("<!-- predicted: step") == text.count("<!-- measured: step") == 1


def test_mistakes(tmp_path: Path) -> None:
    run = interleaved_run()
    with pytest.raises(ValueError, match=r"ends in '\.pdf'; allowed: \.png, \.svg, \.json"):
        write_timeline(tmp_path / "t.pdf", {"predicted": run.events}, num_ranks=3)
    with pytest.raises(ValueError, match="no events"):
        write_timeline(tmp_path / "t.png", {"measured": ()}, num_ranks=3)
