"""The reader of a configuration and a batch like those it will read: what ``python -m pipeline.plan`` plans.

The planner knows nothing of this package; it finds this function by its import path.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from data.command_line import parse
from data.dataset import Dataset
from pipeline import BlockProgram, Plan
from pipeline.config import ParallelConfig
from pipeline.costs import Beside
from rag_mm.config import Config
from rag_mm.memory import Memory
from rag_mm.mesh import Mesh
from rag_mm.model import build_model
from rag_mm.planning import beside_the_reader, choose_vision, planned_batch
from rag_mm.step import JointStep
from rag_mm.towers import DealtTowers
from rag_mm.vision_choice import Vision, make_vision, mode_of


def for_planning(
    config_path: str, overrides: list[str]
) -> tuple[BlockProgram, dict[str, Tensor], ParallelConfig, Callable[[ParallelConfig], tuple[Beside, ...]]]:
    """The program that training would cut, one replica's batch of it, the layout asked for, and what each rank holds
    beside its stages in a layout.

    ``reader.vision`` decides as in training whether the program has the vision block; what ``auto`` finds is said on
    stderr. It looks at the configuration alone, not at ``--stages``, ``--microbatches`` and ``--cluster``.

    Args:
        config_path: YAML file of a run, or "" for the defaults.
        overrides: flags such as ``["--train.batch_size", "64"]``.
    """
    given = ["--config", config_path] if config_path else []
    config = parse(Config, [*given, *overrides], prog="python -m pipeline.plan", description="")
    dataset = Dataset.of(config.data)
    model = build_model(config, dataset)
    mesh = Mesh(num_stages=1, num_replicas=1)
    memory = Memory(
        dataset.store, Path(config.run_dir), mesh, image_size=config.data.image_size,
        batch_size=config.index.batch_size, keep=config.index.keep_versions,
    )  # fmt: skip
    towers = DealtTowers(model.encoder, mesh)
    joint = JointStep(config, dataset, towers=towers, collator=model.collator, memory=memory, mesh=mesh)
    torch.set_num_threads(config.train.threads)
    reader = model.reader.train()
    vision, said = _vision(config, reader, joint, mesh)
    if said:
        print(f"for parallel.pipeline_stages {config.parallel.pipeline_stages}, {said}", file=sys.stderr)
    if config.parallel.towers == "piped":
        print("parallel.towers piped: this is the reader's plan; training cuts the towers itself", file=sys.stderr)
    program = reader if vision is None else vision.program

    def beside(parallel: ParallelConfig) -> tuple[Beside, ...]:
        return beside_the_reader(replace(config, parallel=parallel), joint, mesh, vision)

    return program, planned_batch(config, joint, vision), config.parallel, beside


def _vision(config: Config, reader: BlockProgram, joint: JointStep, mesh: Mesh) -> tuple[Vision | None, str]:
    """As training would: what a given plan says, or what `choose_vision` finds."""
    if config.parallel.plan and config.reader.vision == "auto":
        given = Plan.read(config.parallel.plan)
        vision = make_vision(mode_of(given), reader, mesh, num_microbatches=config.parallel.num_microbatches)
        return vision, ""
    vision, _, said = choose_vision(config, reader, joint, mesh)
    return vision, said
