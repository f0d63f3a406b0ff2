"""The examples of docs/adapters.md run and do what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.adapters import supported

TEXT = (Path(__file__).parents[3] / "docs" / "adapters.md").read_text()


EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.S)


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(EXAMPLES[0], "docs/adapters.md", "exec"), {"__name__": "example"})
    said = capsys.readouterr().out
    assert "carry: hidden, cos, sin, mask" in said
    difference = re.search(r"logits differ by (\S+)", said)
    assert difference is not None and float(difference[1]) < 1e-6
    assert re.search(r"loss 4\.\d+", said)  # log(64) = 4.16 for random weights
    assert "38 tensors, first model.embed_tokens.weight" in said


def test_the_example_with_documents_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(EXAMPLES[1], "docs/adapters.md", "exec"), {"__name__": "example"})
    said = capsys.readouterr().out
    losses = re.search(r"losses \[(\S+), (\S+)\]", said)
    assert losses is not None and all(11.5 < float(part) < 13.5 for part in losses.groups())  # 3 log(64) = 12.5
    assert "gradient on the scores (2, 3)" in said
    assert re.search(r"answers \(2, [1-4]\)", said)


def test_every_supported_class_is_in_the_table() -> None:
    for name in supported():
        kind = name.partition(".")[2]
        family = re.sub("(ForCausalLM|LMHeadModel|Model)$", "", kind)
        assert kind in TEXT or family in TEXT or name.startswith("open_clip"), name
