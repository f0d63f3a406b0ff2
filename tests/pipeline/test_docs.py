"""The example of docs/pipeline.md runs and proves what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.S)
    assert code is not None
    monkeypatch.chdir(tmp_path)
    exec(compile(code[1], "docs/pipeline.md", "exec"), {"__name__": "example"})
    assert "gradients agree within" in capsys.readouterr().out
    assert (tmp_path / "step.json").exists()
