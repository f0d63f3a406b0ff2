"""A resumed run goes on with the plans of its folder, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import Plan
from rag_mm.trainer import Trainer
from tests.rag_mm.joint_setup import config


def test_a_resumed_run_says_that_it_keeps_its_plans(factbook_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    piped = {"verify": "off", "towers": "piped"}
    first = Trainer(config(factbook_dir, parallel=piped))
    assert "kept the plan" not in capsys.readouterr().err
    first.saving.save(first.step, wait=True, limit_s=None)
    run = Path(first.config.run_dir)
    written = (run / "plan.json").read_text(), (run / "towers.json").read_text()
    Trainer(config(factbook_dir, parallel={**piped, "objective": "memory"}))
    err = capsys.readouterr().err
    for name in ("plan.json", "towers.json"):
        assert f"kept the plan {run / name} of the run, whatever parallel.pins, objective" in err
    assert ((run / "plan.json").read_text(), (run / "towers.json").read_text()) == written
    again = Trainer(config(factbook_dir, num_microbatches=4, parallel=piped))  # another layout: planned anew
    assert "kept the plan" not in capsys.readouterr().err
    towers = Plan.from_json((run / "towers.json").read_text())
    assert (again.pipeline.plan.num_microbatches, towers.num_microbatches) == (4, 4)
