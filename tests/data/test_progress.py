from __future__ import annotations

import io
import types

import pytest
from rich.console import Console

from data import progress as module


def test_progress_says_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no terminal: what was found done at the start says nothing about speed."""
    clock = iter([0.0, 10.0, 12.0, 13.0, 20.0])
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(module, "SAY_EVERY_S", 5.0)
    out = io.StringIO()
    with module.progress(Console(file=out, force_terminal=False), "answer joint", 100, "questions") as advance:
        advance(40)  # at 10 s
        advance(10)  # at 12 s: 10 in 2 s, and 50 are left
        advance(10)  # at 13 s: not before 5 s are over
        advance(10)  # at 20 s: 30 in 10 s, and 30 are left
    assert out.getvalue().splitlines() == [
        "answer joint: 50 of 100 questions, 10 s left",
        "answer joint: 70 of 100 questions, 10 s left",
    ]
