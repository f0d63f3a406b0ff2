"""Steps that must not be taken."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from rag_mm.bad_steps import BadSteps, BadStepsFile

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("loss, norm", [(NAN, 1.0), (INF, 1.0), (1.0, NAN), (1.0, INF), (-INF, 1.0)])
def test_what_is_not_finite_is_never_taken(loss: float, norm: float):
    steps = BadSteps(sigma=0, window=4)
    assert steps.judge({"generation": 1.0}, 1.0) is None
    assert "not finite" in (steps.judge({"generation": loss}, norm) or "")
    assert (steps.total, steps.in_a_row) == (1, 1)
    assert steps.judge({"generation": 1.0}, 1e30) is None  # no rule for spikes
    assert (steps.total, steps.in_a_row) == (1, 0)


def test_a_spike_is_judged_by_the_steps_that_were_taken():
    # Losses 1, 2, 3, 4: mean 2.5, deviation sqrt(1.25) = 1.118; 2 of them above is 4.736.
    steps = BadSteps(sigma=2, window=4)
    for loss in (1.0, 2.0, 3.0):
        assert steps.judge({"a": loss}, 1.0) is None
    assert steps.judge({"a": 4.0}, 1.0) is None
    assert steps.judge({"a": 4.75}, 1.0) == "loss 4.75 is above 4.736"
    assert steps.judge({"a": 4.75}, 1.0) is not None  # what was not taken does not raise the mean
    assert steps.judge({"a": 2.5}, 1.1) == "gradient norm 1.1 is above 1"
    assert steps.judge({"a": 4.73}, 1.0) is None
    assert steps.judge({"a": 1.0, "b": 90.0}, 1.0) is None  # a new objective raises the loss by itself


def test_a_resumed_run_judges_as_the_undisturbed_one():
    draw = random.Random(0)
    numbers = [(draw.gauss(1, 0.1) + 5 * (draw.random() < 0.1), draw.gauss(2, 0.3)) for _ in range(200)]
    whole = BadSteps(sigma=3, window=16)
    verdicts = [whole.judge({"a": loss}, norm) for loss, norm in numbers]
    assert 5 < sum(v is not None for v in verdicts) < 60
    for cut in (3, 50, 120):
        first, second = BadSteps(sigma=3, window=16), BadSteps(sigma=3, window=16)
        before = [first.judge({"a": loss}, norm) for loss, norm in numbers[:cut]]
        second.load(json.loads(json.dumps(first.state())))
        assert before + [second.judge({"a": loss}, norm) for loss, norm in numbers[cut:]] == verdicts
        assert second.total == whole.total


def test_the_file_has_each_step_once_after_a_crash(tmp_path: Path):
    file = BadStepsFile(tmp_path, start_step=0)
    for step in (3, 5, 8):
        file.write(step=step, reason="loss is not finite", loss=NAN, norm=1.0, sample_ids=["a", "b"])
    file.path.write_text(file.path.read_text() + '{"step": 9, "rea')  # killed
    again = BadStepsFile(tmp_path, start_step=6)
    again.write(step=8, reason="spike", loss=9.0, norm=INF, sample_ids=["c"])
    lines = [json.loads(line) for line in file.path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 5, 8]
    assert lines[0] == {
        "step": 3, "reason": "loss is not finite", "loss": None, "grad_norm": 1.0, "sample_ids": ["a", "b"],
    }  # fmt: skip
    assert lines[2]["grad_norm"] is None
