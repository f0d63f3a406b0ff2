"""A run without training: fresh weights in a checkpoint, as train.py would have left them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from data.command_line import dump
from data.config import DataConfig
from data.dataset import Dataset
from rag_mm.config import Config
from rag_mm.evaluate.answer import Run, load_run, weights
from rag_mm.mesh import Mesh
from rag_mm.model import build_model
from rag_mm.reader.config import ReaderConfig
from rag_mm.saver import save


def small_config(factbook_dir: Path, run_dir: Path) -> Config:
    """A reader as small as it gets."""
    return Config(
        run_dir=str(run_dir),
        data=DataConfig(dir=str(factbook_dir), max_answer_tokens=4),
        reader=ReaderConfig(width=16, heads=2, encoder_layers=1, decoder_layers=1, ffn_width=16),
    )


def save_untrained(config: Config) -> None:
    """Write the run folder of ``config`` with fresh weights as its last step."""
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(dump(config))
    model = build_model(config, Dataset(config.data.dir, fold=config.data.fold))
    mesh = Mesh(num_stages=1, num_replicas=1)
    save(run_dir, config.train.steps, tensors=weights(model), state={}, mesh=mesh, keep=1)


def save_lively(config: Config) -> None:
    """The same, but it says many things: its pointer and its vocabulary are sharper than fresh ones."""
    run_dir = Path(config.run_dir)
    model = build_model(config, Dataset(config.data.dir))
    pointer = model.reader.blocks[-1].module.pointer
    with torch.no_grad():
        pointer.query.weight.mul_(20.0)
        pointer.vocabulary.bias.normal_(std=3.0, generator=torch.Generator().manual_seed(0))
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(dump(config))
    mesh = Mesh(num_stages=1, num_replicas=1)
    save(run_dir, config.train.steps, tensors=weights(model), state={}, mesh=mesh, keep=1)


def with_fusion(config: Config, fusion: str) -> Config:
    """The configuration with another kind of reader."""
    return dataclasses.replace(config, reader=dataclasses.replace(config.reader, fusion=fusion))


@pytest.fixture(scope="session")
def run_dir(factbook_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "joint"
    save_untrained(small_config(factbook_dir, path))
    return path


@pytest.fixture(scope="session")
def run(run_dir: Path) -> Run:
    return load_run(run_dir)
