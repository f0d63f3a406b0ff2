"""The example of docs/adapters.md runs and does what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.adapters import supported

TEXT = (Path(__file__).parents[3] / "docs" / "adapters.md").read_text()


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = re.search(r"```python\n(.*?)```", TEXT, re.S)
    assert code is not None
    exec(compile(code[1], "docs/adapters.md", "exec"), {"__name__": "example"})
    said = capsys.readouterr().out
    assert "carry: hidden, cos, sin, mask" in said
    difference = re.search(r"logits differ by (\S+)", said)
    assert difference is not None and float(difference[1]) < 1e-6
    assert re.search(r"loss 4\.\d+", said)  # log(64) = 4.16 for random weights
    assert "38 tensors, first model.embed_tokens.weight" in said


def test_every_supported_class_is_in_the_table() -> None:
    for name in supported():
        kind = name.partition(".")[2]
        family = re.sub("(ForCausalLM|LMHeadModel|Model)$", "", kind)
        assert kind in TEXT or family in TEXT or name.startswith("open_clip"), name
