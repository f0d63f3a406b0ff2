"""All draws of a training step are keyed: it leaves the states of torch's, numpy's and random's generators alone."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy
import torch

from rag_mm import launch
from rag_mm.trainer import Trainer
from tests.rag_mm.joint_setup import config


def states() -> tuple[bytes, bytes, object]:
    return torch.get_rng_state().numpy().tobytes(), repr(numpy.random.get_state()).encode(), random.getstate()


def test_a_step_leaves_generators_alone(factbook_dir: Path, tmp_path: Path):
    trainer = Trainer(replace(config(factbook_dir, parallel={"verify": "off"}), run_dir=str(tmp_path / "run")))
    assert trainer.config.reader.dropout > 0  # else there would be nothing to draw
    trainer.open_files()
    before = states()
    with launch.Interrupt() as interrupt:
        assert trainer.run(interrupt) == 0
    assert states() == before
