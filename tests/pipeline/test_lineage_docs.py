"""The example of docs/lineage.md runs and says what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "lineage.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.S)
    assert code is not None
    exec(compile(code[1], "docs/lineage.md", "exec"), {"__name__": "example"})
    printed = capsys.readouterr().out
    assert "block 'encoder' mixes" in printed and "encoder.1.1 (BatchNorm1d), in batch_norm" in printed
    assert "encoder.1.1 BatchNorm1d -> GroupNorm(4, 8" in printed
    assert "encoder.1.2 Dropout -> KeyedDropout(p=0.1)" in printed
    assert printed.endswith("['group', 'sample', 'sample']\n")
