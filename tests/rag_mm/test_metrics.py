"""``metrics.jsonl``: each step once, whatever the disk does."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rag_mm.metrics import MetricsWriter, Window, read_metrics

NAN = float("nan")


def test_a_full_disk_costs_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    writer, write, full = MetricsWriter(tmp_path, start_step=0), os.write, True

    def half(descriptor: int, data: Any) -> int:
        if full and descriptor == writer._file._descriptor:
            write(descriptor, bytes(data)[:5])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", half)
    writer.write({"step": 1, "loss": 3.0})
    writer.write({"step": 2, "loss": 2.0})
    assert writer.problem is not None and "No space left" in writer.problem
    with pytest.raises(OSError, match="No space left"):
        writer.flush()
    full = False
    writer.write({"step": 3, "loss": NAN})
    assert writer.problem is None
    writer.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": None}]


def test_a_resumed_run_has_each_step_once(tmp_path: Path):
    writer = MetricsWriter(tmp_path, start_step=0)
    for step in range(1, 6):
        writer.write({"step": step, "loss": 1.0 / step})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed
    again = MetricsWriter(tmp_path, start_step=3)
    again.write({"step": 4, "loss": 0.25})
    again.close()
    assert read_metrics(tmp_path) == [{"step": step, "loss": 1.0 / step} for step in range(1, 5)]


def test_a_window_is_good_if_a_step_was_taken_and_all_losses_were_finite():
    window = Window()
    assert not window.good
    window.add({"loss": 2.0, "hit_at_k": None, "token_accuracy": 0.5}, taken=False)
    assert not window.good
    window.add({"loss": 4.0, "hit_at_k": 0.25, "token_accuracy": None}, taken=True)
    assert window.good and window.means() == {"loss": 3.0, "hit_at_k": 0.25, "token_accuracy": 0.5}
    window.add({"loss": NAN, "hit_at_k": 0.75, "token_accuracy": None}, taken=False)
    assert not window.good and window.means() == {"hit_at_k": 0.5, "token_accuracy": 0.5}
    window.clear()
    assert window.means() == {}


def test_events_end_on_a_full_disk_without_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    writer, hook = MetricsWriter(tmp_path, start_step=0), threading.excepthook

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer._events.file_writer.event_writer._async_writer._writer, "write", full)
    end, step = time.monotonic() + 30, 0
    while writer.events_problem is None:
        assert time.monotonic() < end
        step += 1
        writer.write({"step": step, "loss": 1.0})
        writer._events.file_writer.event_writer._async_writer._byte_queue.put(b"event")
    assert "No space left" in writer.events_problem
    writer.close()
    assert len(read_metrics(tmp_path)) == step and "Traceback" not in capfd.readouterr().err
    assert hook is not threading.excepthook
