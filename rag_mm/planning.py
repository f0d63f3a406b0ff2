"""Where to cut the reader: trace it with all ranks busy, partition, agree; or take the plan that is given."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from data.document_store import DocumentStore
from pipeline import BlockProgram, Plan, Profile, partition, trace
from pipeline.cluster import Cluster
from pipeline.costs import Beside
from pipeline.lineage import require_sample_lineage
from pipeline.padding import pad_batch
from pipeline.trace_bar import trace_bar
from rag_mm.config import Config
from rag_mm.mesh import Mesh
from rag_mm.prepared import replica_share
from rag_mm.step import JointStep
from rag_mm.tower_memory import tower_memory, vision_memory
from rag_mm.tower_program import tower_program
from rag_mm.towers import ROW_BUCKET, PipedTowers
from rag_mm.vision_choice import MODES, Vision, choose, make_vision, mode_of
from rag_mm.vision_grouped import IMAGE, VisionGrouped
from rag_mm.vision_once import VisionOnce
from retriever.embed import stored_features
from retriever.encoder import DualEncoder

# Enough to see any mixing that does not depend on how large the batch is; the proof runs on the whole batch.
LINEAGE_SAMPLES = 4


def plan_reader(
    config: Config, reader: BlockProgram, joint: JointStep, mesh: Mesh, *, saved: Plan | None = None
) -> tuple[Plan, Vision | None, str]:
    """The plan that every rank runs, the reader with pictures grouped or once (None: as it is), what to say of that.

    Args:
        reader: the whole reader.
        joint: gives a batch, on which blocks are traced. All ranks trace at once, because that is how they will
            compute; rank 0's figures count.
        saved: of the run that is resumed; taken if it fits ``reader.vision``.

    Raises:
        ValueError: on every rank, if a given plan does not fit the model or the layout, there are more stages than
            blocks, or a block mixes samples.
    """
    wanted = config.reader.vision
    given = _given_plan(config) or saved
    if given is not None:
        mode = mode_of(given)
        if wanted in ("auto", mode) or given is not saved:
            vision = _vision(config, mode if wanted == "auto" else wanted, reader, mesh)
            given.validate(reader if vision is None else vision.program)
            return given, vision, kept_plan(config, "plan.json") if given is saved else ""
    vision, profile, said = choose_vision(config, reader, joint, mesh)
    program = reader if vision is None else vision.program
    profile = profile or _trace(config, program, planned_batch(config, joint, vision), mesh)
    return _partition(config, profile, beside_the_reader(config, joint, mesh, vision)), vision, said


def beside_the_reader(config: Config, joint: JointStep, mesh: Mesh, vision: Vision | None) -> tuple[Beside, ...]:
    """What each rank of a pipeline holds beside its stages; empty where nobody asks about memory.

    That is the retriever's towers, and the vision block if pictures are encoded once.
    """
    parallel, towers = config.parallel, joint.towers
    if Cluster.of(parallel).capacity_bytes is None and parallel.objective != "memory":
        return ()
    plan = None
    if parallel.towers == "piped":
        if isinstance(towers, PipedTowers) and towers.plan.num_ranks == parallel.pipeline_stages:
            plan = towers.plan
        else:  # the planning command has none
            plan = make_towers_plan(config, joint.encoder, joint.memory.store, mesh)
    example = joint.example()
    found = tower_memory(config, joint.encoder, example, plan)
    if isinstance(vision, VisionOnce):
        once = vision_memory(vision, example, num_ranks=parallel.pipeline_stages * parallel.data_replicas)
        found = tuple(
            Beside(towers.static_bytes + once.static_bytes, max(towers.working_bytes, once.working_bytes))
            for towers in found
        )
    found = mesh.broadcast(found)
    assert isinstance(found, tuple)
    return found


def choose_vision(
    config: Config, reader: BlockProgram, joint: JointStep, mesh: Mesh
) -> tuple[Vision | None, Profile | None, str]:
    """What ``reader.vision`` makes of the reader where no plan is given; see `plan_reader` for the arguments.

    Returns:
        The reader with pictures grouped or once (None: as it is), its profile if it had to be traced to decide, and
        what to say of the decision.
    """
    if config.reader.vision != "auto":
        return _vision(config, config.reader.vision, reader, mesh), None, ""
    reads_P, parallel = joint.expected_reads(), config.parallel
    visions = {mode: _vision(config, mode, reader, mesh) for mode in MODES}
    profiles = {}
    for mode, vision in visions.items():
        program = reader if vision is None else vision.program
        profiles[mode] = _trace(config, program, planned_batch(config, joint, vision, reads_P=reads_P), mesh)
    beside = {mode: beside_the_reader(config, joint, mesh, vision) for mode, vision in visions.items()}
    sharing = reads_P.numel() / reads_P.unique().numel()
    chosen, seconds = choose(
        profiles, partition=lambda mode, profile: _partition(config, profile, beside[mode]), sharing=sharing,
        k=reads_P.numel() // config.train.batch_size, num_replicas=parallel.data_replicas,
        num_ranks=parallel.pipeline_stages * parallel.data_replicas,
    )  # fmt: skip
    predicted = ", ".join(
        f"{mode} {seconds[mode] * 1e3:.0f} ms" if math.isfinite(seconds[mode]) else f"{mode} does not fit"
        for mode in MODES
    )
    said = f"pictures: {sharing:.2f} pairs read each document; predicted for a step: {predicted}; so {chosen}"
    return visions[chosen], profiles[chosen], said


def _vision(config: Config, mode: str, reader: BlockProgram, mesh: Mesh) -> Vision | None:
    return make_vision(mode, reader, mesh, num_microbatches=config.parallel.num_microbatches)


def kept_plan(config: Config, name: str) -> str:
    """What to say where a run goes on with a plan of its folder."""
    path = Path(config.run_dir) / name
    return (
        f"kept the plan {path} of the run, whatever parallel.pins, objective, capacity_bytes and cluster say now; "
        "remove it to plan anew"
    )


def _given_plan(config: Config) -> Plan | None:
    parallel = config.parallel
    if not parallel.plan:
        return None
    plan = Plan.read(parallel.plan)
    for name, theirs, ours in (
        ("pipeline_stages", plan.num_ranks, parallel.pipeline_stages),
        ("chunks", plan.num_stages // plan.num_ranks, parallel.chunks),
        ("schedule", plan.schedule, parallel.schedule),
        ("num_microbatches", plan.num_microbatches, parallel.num_microbatches),
    ):
        if theirs != ours:
            raise ValueError(f"parallel.{name} is {ours}, but {theirs} in the plan {parallel.plan}; make them equal")
    return plan


def planned_batch(
    config: Config, joint: JointStep, vision: Vision | None, *, reads_P: Tensor | None = None
) -> dict[str, Tensor]:
    """A replica's batch of the reader, or of the reader with pictures grouped or once.

    Args:
        reads_P: `JointStep.expected_reads`, if known: how many pictures a micro-batch shares follows from it.
    """
    example = joint.example()
    batch = joint.reader_inputs(example, example.query_embedding, example.document_embedding)
    num, replicas = config.train.batch_size, config.parallel.data_replicas
    if isinstance(vision, VisionOnce):
        image_N3SS, row_P = vision.images(example)
        batch = vision.inputs(batch, vision.embed(image_N3SS).requires_grad_(), row_P)
    share = replica_share(batch, num, 0, replicas)
    if isinstance(vision, VisionGrouped):
        reads_P = joint.expected_reads() if reads_P is None else reads_P
        different, number_P = replica_share({"reads": reads_P}, num, 0, replicas)["reads"].unique(return_inverse=True)
        # The example's documents are hardly shared, so its pictures stand for those that would be read.
        image_C3SS = share[IMAGE][torch.arange(different.shape[0]) % share[IMAGE].shape[0]]
        share = vision.inputs(share, image_C3SS, number_P)
    return share


def _trace(config: Config, program: BlockProgram, batch: dict[str, Tensor], mesh: Mesh) -> Profile:
    if program.num_samples(batch) < 2:
        raise ValueError("train.batch_size gives a replica 1 sample; at least 2 are needed to tell what mixes samples")
    mesh.barrier()
    count = config.parallel.num_microbatches
    with trace_bar(Console(stderr=True, quiet=mesh.rank != 0)) as progress:
        profile = trace(
            program, batch, num_microbatches=count, lineage_samples=LINEAGE_SAMPLES, progress=progress,
            busy_ranks=mesh.size, **_cache(config, mesh),
        )  # fmt: skip
    require_sample_lineage(profile)
    return Profile.from_json(mesh.broadcast(profile.to_json()))


def _cache(config: Config, mesh: Mesh) -> dict[str, Any]:
    """Rank 0 keeps and reads traces; all ranks take what it finds, or all trace."""
    folder = config.parallel.trace_cache
    if not folder:
        return {}

    def agree(found: Profile | None) -> Profile | None:
        text = mesh.broadcast(None if found is None else found.to_json())
        return None if text is None else replace(Profile.from_json(text), cached=True)

    return {"cache_dir": folder if mesh.is_first else None, "agree": agree}


def _partition(config: Config, profile: Profile, beside: tuple[Beside, ...] = ()) -> Plan:
    parallel, cluster = config.parallel, Cluster.of(config.parallel)
    return partition(
        profile,
        num_stages=parallel.num_stages,
        num_ranks=parallel.pipeline_stages,
        schedule=parallel.schedule,
        num_microbatches=parallel.num_microbatches,
        objective=parallel.objective,
        capacity_bytes=cluster.capacity_bytes,
        link_latency_s=cluster.link_latency_s,
        link_bytes_per_s=cluster.link_bytes_per_s,
        pins=parallel.pins,
        beside=beside,
    )


def make_towers_plan(config: Config, encoder: DualEncoder, store: DocumentStore, mesh: Mesh) -> Plan:
    """Where to cut the retriever's towers, traced on documents of the store.

    With a capacity they are cut for the least memory, whatever the objective; what is left is the reader's.

    Raises:
        ValueError: on every rank, if there are more stages than blocks.
    """
    parallel, program = config.parallel, tower_program(encoder)
    if parallel.pipeline_stages > len(program.blocks):
        raise ValueError(
            f"parallel.pipeline_stages is {parallel.pipeline_stages}, but the towers (parallel.towers piped) have "
            f"{len(program.blocks)} blocks; use at most {len(program.blocks)} stages, or parallel.towers dealt"
        )
    features = stored_features(encoder, store, store.ids[:ROW_BUCKET], image_size=config.data.image_size)
    batch = pad_batch(program, features, multiple=ROW_BUCKET * parallel.num_microbatches, weights=())
    mesh.barrier()
    profile = trace(
        program, batch, num_microbatches=parallel.num_microbatches, lineage_samples=LINEAGE_SAMPLES,
        busy_ranks=mesh.size, **_cache(config, mesh),
    )  # fmt: skip
    require_sample_lineage(profile)
    schedule = "1f1b" if parallel.num_microbatches >= parallel.pipeline_stages else "gpipe"
    cluster = Cluster.of(parallel)
    return partition(
        Profile.from_json(mesh.broadcast(profile.to_json())),
        num_stages=parallel.pipeline_stages,
        schedule=schedule,
        num_microbatches=parallel.num_microbatches,
        objective=parallel.objective if cluster.capacity_bytes is None else "memory",
        link_latency_s=cluster.link_latency_s,
        link_bytes_per_s=cluster.link_bytes_per_s,
    )
