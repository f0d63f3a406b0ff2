"""Short runs in this process (or on ranks of the tests' pool) whose index is refreshed in one way or another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rag_mm import launch
from rag_mm.config import Config
from rag_mm.trainer import Trainer
from retriever.config import IndexConfig
from tests.rag_mm.joint_setup import config

CLOCKS = ("samples_per_s", "time_s", "peak_memory_bytes")


def settings(
    directory: Path,
    run_dir: Path,
    *,
    index: dict[str, Any],
    rerank: int = 0,
    retriever_towers: str = "shared",
    **how: Any,
) -> Config:
    """Six steps, the reader from the third on, a checkpoint after each second."""
    made = config(directory, **{"steps": 6, "retriever_share": 0.34, "retriever_learning_rate": 2e-2, **how})
    return replace(
        made, run_dir=str(run_dir), index=IndexConfig(batch_size=16, keep_versions=1, **index),
        retriever=replace(made.retriever, rerank=rerank, towers=retriever_towers),
        checkpoint=replace(made.checkpoint, every_n_steps=2, keep=5),
    )  # fmt: skip


def opened(made: Config) -> Trainer:
    """A trainer that has taken up the newest checkpoint of its run folder, if there is one."""
    trainer = Trainer(made)
    trainer.resume()
    trainer.open_files()
    return trainer


def train(made: Config) -> dict[str, Any]:
    """Train to the end; the metrics without clocks, and the weights of the retriever on this rank."""
    trainer = opened(made)
    with launch.Interrupt() as interrupt:
        assert trainer.run(interrupt) == 0
    weights = {name: tensor.clone() for name, tensor in trainer.towers.tensors_here().items()}
    return {"lines": metrics(Path(made.run_dir)), "weights": weights}


def train_on_ranks(directory: Path, run_dir: Path, how: dict[str, Any]) -> dict[str, Any]:
    """The same as a job of a rank."""
    torch.set_num_threads(1)
    return train(settings(directory, run_dir, **how))


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in CLOCKS} for line in lines]
