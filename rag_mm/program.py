"""The reader of a configuration and a batch like those it will read: what ``python -m pipeline.plan`` plans.

The planner knows nothing of this package; it finds this function by its import path.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from data.command_line import parse
from data.dataset import Dataset
from pipeline import BlockProgram
from pipeline.config import ParallelConfig
from rag_mm.config import Config
from rag_mm.memory import Memory
from rag_mm.mesh import Mesh
from rag_mm.model import build_model
from rag_mm.prepared import replica_share
from rag_mm.step import JointStep
from rag_mm.towers import DealtTowers


def for_planning(config_path: str, overrides: list[str]) -> tuple[BlockProgram, dict[str, Tensor], ParallelConfig]:
    """The program, one replica's batch of it, and the layout asked for.

    Args:
        config_path: YAML file of a run, or "" for the defaults.
        overrides: flags such as ``["--train.batch_size", "64"]``.
    """
    given = ["--config", config_path] if config_path else []
    config = parse(Config, [*given, *overrides], prog="python -m pipeline.plan", description="")
    dataset = Dataset(config.data.dir, fold=config.data.fold)
    model = build_model(config, dataset)
    mesh = Mesh(num_stages=1, num_replicas=1)
    memory = Memory(
        dataset.store, Path(config.run_dir), mesh, image_size=config.data.image_size,
        batch_size=config.index.batch_size, keep=config.index.keep_versions,
    )  # fmt: skip
    towers = DealtTowers(model.encoder, mesh)
    joint = JointStep(config, dataset, towers=towers, collator=model.collator, memory=memory, mesh=mesh)
    example = joint.example()
    batch = joint.reader_inputs(example, example.query_embedding, example.document_embedding)
    torch.set_num_threads(config.train.threads)
    share = replica_share(batch, config.train.batch_size, 0, config.parallel.data_replicas)
    return model.reader.train(), share, config.parallel
