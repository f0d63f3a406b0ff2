"""Where to cut the reader: trace it with all ranks busy, partition, agree; or take the plan that is given."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from pipeline import BlockProgram, Plan, partition, trace
from pipeline.lineage import require_sample_lineage
from rag_mm.config import Config
from rag_mm.mesh import Mesh


def make_plan(config: Config, program: BlockProgram, batch: dict[str, Tensor], mesh: Mesh) -> Plan:
    """The plan that every rank runs.

    Args:
        batch: a replica's batch, on which blocks are traced. All ranks trace at once, because that is how
            they will compute; rank 0's figures count.

    Raises:
        ValueError: if a given plan does not fit the model, or a block mixes samples.
    """
    parallel = config.parallel
    if parallel.plan:
        plan = Plan.from_json(Path(parallel.plan).read_text())
        plan.validate(program)
        if plan.num_stages != parallel.pipeline_stages:
            raise ValueError(
                f"parallel.plan {parallel.plan} has {plan.num_stages} stages; "
                f"parallel.pipeline_stages is {parallel.pipeline_stages}"
            )
        return plan
    mesh.barrier()
    profile = trace(program, batch, num_microbatches=parallel.num_microbatches)
    require_sample_lineage(profile)
    text = ""
    if mesh.is_first:
        text = partition(
            profile,
            num_stages=parallel.pipeline_stages,
            schedule=parallel.schedule,
            num_microbatches=parallel.num_microbatches,
            objective=parallel.objective,
        ).to_json()
    return Plan.from_json(mesh.broadcast(text))
