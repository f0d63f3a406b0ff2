"""A joint step over the small factbook with everything on that makes layouts hard, in float32 or float64.

Dropout, a tied embedding, documents that several questions read, ragged texts, and samples of weight 0.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from data.config import DataConfig
from data.dataset import Dataset, Pair, Sample
from pipeline import BlockProgram, Pipeline, Plan
from pipeline.config import ParallelConfig
from rag_mm.config import Config, TrainConfig
from rag_mm.memory import Memory
from rag_mm.mesh import Mesh
from rag_mm.model import build_model
from rag_mm.objectives import ObjectivesConfig
from rag_mm.prepared import Prepared
from rag_mm.reader.config import ReaderConfig
from rag_mm.step import JointStep
from rag_mm.tower_program import tower_program
from rag_mm.towers import DealtTowers, PipedTowers, Towers
from retriever.config import RetrieverConfig
from retriever.encoder import DualEncoder

RETRIEVER = RetrieverConfig(k=3, learned_text=True, text_buckets=256, text_dim=64, image_dim=16, image_width=8)
BAD_SAMPLES = (0, 5)
READER = ReaderConfig(width=16, heads=2, ffn_width=24, encoder_layers=1, decoder_layers=2, dropout=0.2)


def config(
    directory: Path,
    *,
    ranks: int = 1,
    replicas: int = 1,
    schedule: str = "1f1b",
    num_microbatches: int = 2,
    reader: ReaderConfig = READER,
    objectives: ObjectivesConfig | None = None,
    parallel: dict[str, Any] | None = None,
    retriever: RetrieverConfig | None = None,
    **train: Any,
) -> Config:
    """A run of four steps in which the reader trains from the first on, with a small retriever."""
    return Config(
        run_dir=str(directory.parent / "run"),
        data=DataConfig(dir=str(directory), max_document_tokens=40),
        retriever=retriever or RETRIEVER,
        reader=reader,
        objectives=objectives or ObjectivesConfig(pdist=0.7, emdr2=0.3, contrastive=0.5),
        train=TrainConfig(
            **{"steps": 4, "retriever_share": 0.0, "distill_share": 0.0, "batch_size": 8, "pair_batch_size": 6, **train}
        ),
        parallel=ParallelConfig(
            pipeline_stages=ranks, chunks=2 if schedule == "interleaved" else 1, data_replicas=replicas,
            num_microbatches=num_microbatches, schedule=schedule, **(parallel or {}),
        ),
    )  # fmt: skip


def build(settings: Config, run_dir: Path) -> tuple[JointStep, BlockProgram]:
    """A step whose samples `BAD_SAMPLES` have weight 0, and the reader; weights depend on the seed only."""
    mesh = Mesh(num_stages=settings.parallel.pipeline_stages, num_replicas=settings.parallel.data_replicas)
    dataset = Dataset(settings.data.dir)
    model = build_model(settings, dataset)
    # An untrained picture tower finds all pictures alike. A document's gradient then cancels over the documents of a
    # question, and float32 is left with few digits of it, on one process as on many.
    with torch.no_grad():
        if settings.retriever.image == "small":
            for parameter in model.encoder.image.parameters():
                parameter.mul_(3.0)
    memory = Memory(dataset.store, run_dir, mesh, image_size=24, batch_size=64, keep=1)
    towers: Towers = DealtTowers(model.encoder, mesh)
    if settings.parallel.towers == "piped":
        towers = PipedTowers(model.encoder, mesh, towers_plan(settings, model.encoder), timeout_s=60)
    joint = JointStep(settings, dataset, towers=towers, collator=model.collator, memory=memory, mesh=mesh)
    whole = joint.samples

    def some_bad(step: int) -> tuple[list[Sample], list[Pair]]:
        samples, pairs = whole(step)
        bad = [replace(s, weight=0.0, gold=()) if i in BAD_SAMPLES else s for i, s in enumerate(samples)]
        return bad, pairs

    joint.samples = some_bad  # type: ignore[method-assign]
    return joint, model.reader.train()


def equal_cuts(program: BlockProgram, num_stages: int) -> list[int]:
    """Stages of as equal numbers of blocks as can be."""
    return [len(program.blocks) * i // num_stages for i in range(1, num_stages)]


def towers_plan(settings: Config, encoder: DualEncoder) -> Plan:
    """The towers cut into one equal stage a rank."""
    program, parallel = tower_program(encoder), settings.parallel
    cuts = equal_cuts(program, parallel.pipeline_stages)
    return Plan.from_cuts(program, cuts, schedule="gpipe", num_microbatches=parallel.num_microbatches)


def make_pipeline(settings: Config, joint: JointStep, reader: BlockProgram) -> Pipeline:
    """The reader's pipeline, in equal stages."""
    parallel = settings.parallel
    plan = Plan.from_cuts(
        reader, equal_cuts(reader, parallel.num_stages),
        schedule=parallel.schedule, num_microbatches=parallel.num_microbatches, num_ranks=parallel.pipeline_stages,
    )  # fmt: skip
    return Pipeline(reader, plan, group=joint.mesh.pipeline, timeout_s=60)


def prepare(joint: JointStep, *, step: int = 1) -> Prepared:
    """A batch of retrieved documents from a fresh index."""
    joint.memory.refresh(joint.towers, step=0, probe_BE=None, k=joint.config.retriever.k, named=set())
    return joint.prepare(step)


def in_float64(joint: JointStep, program: BlockProgram, prepared: Prepared) -> None:
    """Turn weights and the prepared batch to float64, the retrieved ids kept; embeddings are computed anew."""
    joint.encoder.double()
    program.double()

    def double(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}

    prepared.query, prepared.document = double(prepared.query), double(prepared.document)
    prepared.reader = double(prepared.reader)
    prepared.contrastive_weight = prepared.contrastive_weight.double()
    with torch.no_grad():
        prepared.query_embedding = joint.encoder(prepared.query)
        prepared.document_embedding = joint.encoder(prepared.document)


def gradients_here(joint: JointStep, prepared: Prepared, pipeline: Pipeline) -> dict[str, torch.Tensor]:
    """This rank's gradients by name, after one step; ``.grad`` was emptied before."""
    named = {f"reader.{n}": p for n, p in pipeline.parameters_here.items()}
    named |= {f"retriever.{n}": p for n, p in (*joint.towers.sharded.items(), *joint.towers.replicated.items())}
    for parameter in named.values():
        parameter.grad = None
    joint.gradients(prepared, pipeline)
    return {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
