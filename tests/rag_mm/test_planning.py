"""What of a configuration reaches the plan, and plans that contradict it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline import Plan
from pipeline.config import ParallelConfig
from rag_mm.config import Config, TrainConfig
from rag_mm.mesh import Mesh
from rag_mm.planning import _given_plan, _partition, _trace
from tests.pipeline.fid_program import fid_batch, fid_program


def plan_with(**fields: Any) -> Plan:
    # A mesh of one process: planning itself sends nothing that one process cannot.
    parallel = ParallelConfig(num_microbatches=2, **fields)
    frozen = TrainConfig(joint_retriever_scale=0.0)  # what zero_bubble asks for
    config, program = Config(train=frozen, parallel=parallel), fid_program(p=0.0)
    given = _given_plan(config)
    if given is not None:
        return given
    return _partition(config, _trace(config, program, fid_batch(4), Mesh(num_stages=1, num_replicas=1)))


def test_chunks_pins_and_cluster_reach_the_plan(tmp_path: Path) -> None:
    plan = plan_with(pipeline_stages=2, chunks=2, schedule="interleaved", pins=("target",))
    assert (plan.num_stages, plan.num_ranks, plan.schedule) == (4, 2, "interleaved")
    assert "target" in [stage.blocks[0] for stage in plan.stages]
    slow = tmp_path / "slow.yaml"
    slow.write_text("link_latency_s: 10.0\n")
    assert plan_with(pipeline_stages=2, cluster=str(slow)).step_s > 10 > plan.step_s
    with pytest.raises(ValueError, match="smallest capacity that would do"):
        plan_with(pipeline_stages=2, capacity_bytes=10.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pipeline_stages": 4}, r"parallel.pipeline_stages is 4, but 2 in the plan"),
        ({"pipeline_stages": 2}, r"parallel.chunks is 1, but 2 in the plan"),
        (
            {"pipeline_stages": 2, "chunks": 2, "schedule": "zero_bubble"},
            r"parallel.schedule is zero_bubble, but inter",
        ),
    ],
)
def test_a_plan_that_contradicts_the_layout_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    path = tmp_path / "plan.json"
    plan = Plan.from_cuts(fid_program(), [1, 3, 4], schedule="interleaved", num_microbatches=2, num_ranks=2)
    path.write_text(plan.to_json())
    right = {"pipeline_stages": 2, "chunks": 2, "schedule": "interleaved"}
    assert plan_with(plan=str(path), **right) == plan
    with pytest.raises(ValueError, match=message):
        plan_with(plan=str(path), **({"schedule": "gpipe"} | fields))
