"""Predictions that are kept as they come."""

from __future__ import annotations

from pathlib import Path

import pytest

from rag_mm.evaluate.finished import Finished, open_finished
from rag_mm.evaluate.prediction import Prediction

MADE_WITH = {"step": 3, "store": "a+0"}


def predictions(*names: str) -> list[Prediction]:
    """With line breaks of every kind in the text, and a score that has no short decimal."""
    return [
        Prediction(name, f"{name}\n\u2028é\x85", ("d1", "d2"), (0.1 + 0.2, -1e-9), 2, ("documents",)) for name in names
    ]


def test_what_is_appended_is_read_by_whoever_wrote_it(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    assert open_finished(folder, MADE_WITH) == ""
    Finished(folder, writer="0").append("joint", predictions("a", "b"))
    Finished(folder, writer="1").append("joint", predictions("c"))
    Finished(folder, writer="0").append("joint", predictions("d"))
    Finished(folder, writer="0").append("joint_answers_only", predictions("e"))
    assert open_finished(folder, MADE_WITH) == ""
    assert Finished(folder, writer="7").read("joint") == {p.id: p for p in predictions("a", "b", "d", "c")}
    Finished(folder, writer="0").remove()
    assert not folder.exists()


@pytest.mark.parametrize("cut", range(1, 40, 6))
def test_a_line_that_a_kill_cut_off_is_cut_away(tmp_path: Path, cut: int) -> None:
    folder = tmp_path / "x"
    open_finished(folder, MADE_WITH)
    finished = Finished(folder, writer="0")
    finished.append("joint", predictions("a", "b"))
    (path,) = folder.glob("*.jsonl")
    path.write_bytes(path.read_bytes()[:-cut])
    assert "made again: 1" in open_finished(folder, MADE_WITH)
    assert list(finished.read("joint")) == ["a"]
    finished.append("joint", predictions("b"))
    assert list(finished.read("joint")) == ["a", "b"]


def test_another_evaluation_begins_anew_and_says_why(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    open_finished(folder, MADE_WITH)
    Finished(folder, writer="0").append("joint", predictions("a"))
    assert "store was a+0, now a+1" in open_finished(folder, {**MADE_WITH, "store": "a+1"})
    assert Finished(folder, writer="0").read("joint") == {}


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    open_finished(folder, MADE_WITH)
    finished = Finished(folder, writer="0")
    finished.append("joint", predictions("a", "b"))
    (path,) = folder.glob("*.jsonl")
    path.write_text(path.read_text().replace('{"id": "b"', '{"id": b'))
    with pytest.raises(ValueError, match=r"joint@0\.jsonl, line 2 is no prediction; remove the folder"):
        finished.read("joint")
