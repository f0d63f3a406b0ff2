"""Where to cut the reader: trace it with all ranks busy, partition, agree; or take the plan that is given."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from data.document_store import DocumentStore
from pipeline import BlockProgram, Plan, Profile, partition, trace
from pipeline.cluster import Cluster
from pipeline.lineage import require_sample_lineage
from pipeline.padding import pad_batch
from rag_mm.config import Config
from rag_mm.mesh import Mesh
from rag_mm.towers import ROW_BUCKET, tower_program
from retriever.embed import document_features
from retriever.encoder import DualEncoder

# Enough to see any mixing that does not depend on how large the batch is; the proof runs on the whole batch.
LINEAGE_SAMPLES = 4


def make_plan(config: Config, program: BlockProgram, batch: dict[str, Tensor], mesh: Mesh) -> Plan:
    """The plan that every rank runs.

    Args:
        batch: a replica's batch, on which blocks are traced. All ranks trace at once, because that is how
            they will compute; rank 0's figures count.

    Raises:
        ValueError: on every rank, if a given plan does not fit the model or the layout, there are more stages than
            blocks, or a block mixes samples.
    """
    parallel = config.parallel
    if parallel.plan:
        plan = Plan.from_json(Path(parallel.plan).read_text())
        plan.validate(program)
        for name, theirs, ours in (
            ("pipeline_stages", plan.num_ranks, parallel.pipeline_stages),
            ("chunks", plan.num_stages // plan.num_ranks, parallel.chunks),
            ("schedule", plan.schedule, parallel.schedule),
            ("num_microbatches", plan.num_microbatches, parallel.num_microbatches),
        ):
            if theirs != ours:
                raise ValueError(
                    f"parallel.{name} is {ours}, but {theirs} in the plan {parallel.plan}; make them equal"
                )
        return plan
    num_samples = program.num_samples(batch)
    if num_samples < 2:
        raise ValueError("train.batch_size gives a replica 1 sample; at least 2 are needed to tell what mixes samples")
    mesh.barrier()
    profile = trace(program, batch, num_microbatches=parallel.num_microbatches, lineage_samples=LINEAGE_SAMPLES)
    require_sample_lineage(profile)
    cluster = Cluster.of(parallel)
    return partition(
        Profile.from_json(mesh.broadcast(profile.to_json())),
        num_stages=parallel.num_stages,
        num_ranks=parallel.pipeline_stages,
        schedule=parallel.schedule,
        num_microbatches=parallel.num_microbatches,
        objective=parallel.objective,
        capacity_bytes=cluster.capacity_bytes,
        link_latency_s=cluster.link_latency_s,
        link_bytes_per_s=cluster.link_bytes_per_s,
        pins=parallel.pins,
    )


def make_towers_plan(config: Config, encoder: DualEncoder, store: DocumentStore, mesh: Mesh) -> Plan:
    """Where to cut the retriever's towers, traced on documents of the store.

    Raises:
        ValueError: on every rank, if there are more stages than blocks.
    """
    parallel, program = config.parallel, tower_program(encoder)
    documents = store.fetch(store.ids[:ROW_BUCKET])
    features = document_features(encoder, documents, image_size=config.data.image_size)
    batch = pad_batch(program, features, multiple=ROW_BUCKET * parallel.num_microbatches, weights=())
    mesh.barrier()
    profile = trace(program, batch, num_microbatches=parallel.num_microbatches, lineage_samples=LINEAGE_SAMPLES)
    require_sample_lineage(profile)
    schedule = "1f1b" if parallel.num_microbatches >= parallel.pipeline_stages else "gpipe"
    try:
        return partition(
            Profile.from_json(mesh.broadcast(profile.to_json())),
            num_stages=parallel.pipeline_stages,
            schedule=schedule,
            num_microbatches=parallel.num_microbatches,
            objective=parallel.objective,
        )
    except ValueError as error:
        raise ValueError(f"parallel.towers piped: {error}") from error
