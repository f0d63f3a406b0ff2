"""Plans: reading back, hash, and the errors of one edited by hand."""

from __future__ import annotations

import json

import pytest

from pipeline import Plan
from tests.pipeline.fid_program import fid_program


def test_round_trip_and_hash() -> None:
    program = fid_program()
    plan = Plan.from_cuts(program, [2, 4], num_microbatches=4)
    assert Plan.from_json(plan.to_json()) == plan
    timed = json.loads(plan.to_json())
    timed["step_s"] = 3
    assert Plan.from_json(json.dumps(timed)).hash == plan.hash
    assert Plan.from_cuts(program, [2, 5], num_microbatches=4).hash != plan.hash
    assert plan.bounds() == ((0, 2), (2, 4), (4, 6))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("encoder.1", "encoder.2", r"stage 1 names unknown block 'encoder.2' \(did you mean"),
        ("encoder.1", "encoder.0", "'encoder.0' occurs 2 times"),
        ('"1f1b"', '"2f2b"', "schedule is '2f2b'; allowed: gpipe, 1f1b"),
        ('"num_microbatches": 4', '"num_microbatches": 2', "fewer than the 3 stages"),
        ('"num_microbatches": 4', '"num_microbatches": "4"', "must be of type int"),
        ('"step_s"', '"steps"', "unknown field 'steps' .did you mean 'step_s'"),
        ('"schedule": "1f1b",', "", "field 'schedule' is missing"),
        ("{", "", "not valid JSON"),
    ],
)
def test_mistakes(old: str, new: str, message: str) -> None:
    program = fid_program()
    text = Plan.from_cuts(program, [2, 4], num_microbatches=4).to_json().replace(old, new, 1)
    with pytest.raises(ValueError, match=message):
        Plan.from_json(text).validate(program)


def test_order_and_missing_blocks() -> None:
    program = fid_program()
    data = json.loads(Plan.from_cuts(program, [2, 4], num_microbatches=4).to_json())
    data["stages"][0]["blocks"].reverse()
    with pytest.raises(ValueError, match="position 0, where the model has 'embed'"):
        Plan.from_json(json.dumps(data)).validate(program)
    data["stages"][0]["blocks"].pop()
    with pytest.raises(ValueError, match="'embed' of the model is on no stage"):
        Plan.from_json(json.dumps(data)).validate(program)
