"""What of a configuration reaches the plan, and plans that contradict it."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from pipeline import BlockProgram, Plan
from pipeline.config import ParallelConfig
from rag_mm.config import Config, TrainConfig
from rag_mm.mesh import Mesh
from rag_mm.planning import (
    _given_plan,
    _partition,
    _trace,
    beside_the_reader,
    make_towers_plan,
    plan_reader,
    planned_batch,
)
from rag_mm.step import JointStep
from rag_mm.tower_memory import vision_memory
from rag_mm.vision_choice import make_vision
from rag_mm.vision_once import VisionOnce
from tests.pipeline.fid_program import fid_batch, fid_program
from tests.rag_mm.joint_setup import build, config

Joint = tuple[Config, JointStep, BlockProgram, Mesh]


@pytest.fixture(scope="module")
def factory(factbook_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Joint:
    """A step on one process, whose configuration tests change to ask for more ranks."""
    settings = config(factbook_dir)
    joint, reader = build(settings, tmp_path_factory.mktemp("joint"))
    return settings, joint, reader, joint.mesh


def plan_with(**fields: Any) -> Plan:
    # A mesh of one process: planning itself sends nothing that one process cannot.
    parallel = ParallelConfig(num_microbatches=2, **fields)
    frozen = TrainConfig(joint_retriever_scale=0.0)  # what zero_bubble asks for
    settings, program = Config(train=frozen, parallel=parallel), fid_program(p=0.0)
    given = _given_plan(settings)
    if given is not None:
        return given
    return _partition(settings, _trace(settings, program, fid_batch(4), Mesh(num_stages=1, num_replicas=1)))


def test_chunks_pins_and_cluster_reach_the_plan(tmp_path: Path) -> None:
    plan = plan_with(pipeline_stages=2, chunks=2, schedule="interleaved", pins=("target",))
    assert (plan.num_stages, plan.num_ranks, plan.schedule) == (4, 2, "interleaved")
    assert "target" in [stage.blocks[0] for stage in plan.stages]
    slow = tmp_path / "slow.yaml"
    slow.write_text("link_latency_s: 10.0\n")
    assert plan_with(pipeline_stages=2, cluster=str(slow)).step_s > 10 > plan.step_s
    with pytest.raises(ValueError, match="smallest capacity that would do"):
        plan_with(pipeline_stages=2, capacity_bytes=10.0)


@pytest.mark.parametrize("towers", ["dealt", "piped"])
def test_towers_and_reader_share_a_capacity(factory: Joint, tmp_path: Path, towers: str) -> None:
    """What is left of a rank is the reader's; the message says the smallest sum, which then does."""
    settings, joint, reader, mesh = factory
    cache = str(tmp_path / "traces")  # the same trace each time

    def plan(capacity: float) -> Plan:
        parallel = replace(
            settings.parallel, pipeline_stages=2, towers=towers, capacity_bytes=capacity, trace_cache=cache
        )
        return plan_reader(replace(settings, parallel=parallel), reader, joint, mesh)[0]

    with pytest.raises(ValueError, match=r"of which up to (\d+) .* would do is (\d+) bytes") as caught:
        plan(1.0)
    found = re.search(r"of which up to (\d+) .* would do is (\d+) bytes", str(caught.value))
    assert found
    beside, smallest = map(int, found.groups())
    parameters = [p for name, p in joint.encoder.named_parameters() if name != "log_scale"]
    encoder = sum(4 * p.numel() * (4 if p.requires_grad else 1) for p in parameters)
    assert (beside == encoder) if towers == "dealt" else (beside < encoder)
    assert max(stage.memory_bytes for stage in plan(smallest).stages) + beside >= smallest
    with pytest.raises(ValueError, match=f"would do is {smallest} bytes"):
        plan(smallest - 1)


def test_a_vision_block_outside_of_the_pipeline_counts_on_every_rank(factory: Joint) -> None:
    """Its parameters, gradients and moments beside the towers', and the graph of a rank's share of the pictures."""
    settings, joint, reader, mesh = factory
    parallel = replace(settings.parallel, pipeline_stages=2, capacity_bytes=1e9)
    asked = replace(settings, parallel=parallel)
    once = make_vision("once", reader, mesh, num_microbatches=parallel.num_microbatches)
    assert isinstance(once, VisionOnce)
    towers, both = beside_the_reader(asked, joint, mesh, None), beside_the_reader(asked, joint, mesh, once)
    block = sum(4 * p.numel() * 4 for p in once.parameters.values())
    assert [b.static_bytes - t.static_bytes for t, b in zip(towers, both, strict=True)] == [block, block]
    share = once.images(joint.example())[0][::2].shape[0]
    graph = vision_memory(once, joint.example(), num_ranks=2).working_bytes
    patches = (settings.data.image_size // settings.reader.patch) ** 2
    assert graph > share * patches * settings.reader.width * 4  # its result alone
    assert [b.working_bytes for b in both] == [max(t.working_bytes, graph) for t in towers]


def test_a_reader_that_mixes_samples_is_refused_before_it_is_cut(factory: Joint) -> None:
    """Micro-batches would take its mean over a part of the batch, and nothing later would say so."""
    settings, joint, _, mesh = factory
    _, reader = build(settings, joint.memory.directory.parent)
    block = next(block for block in reader.blocks if block.name.startswith("decoder."))
    block.module.register_forward_hook(lambda module, given, out: (out[0] - out[0].mean(0), *out[1:]))
    with pytest.raises(ValueError, match=rf"{re.escape(block.name)}.*mean"):
        plan_reader(settings, reader, joint, mesh)


def test_towers_that_mix_documents_are_refused_before_they_are_piped(factory: Joint) -> None:
    settings, joint, _, mesh = factory
    piped = replace(settings, parallel=replace(settings.parallel, towers="piped"))
    encoder = copy.deepcopy(joint.encoder)
    linear = next(module for module in encoder.modules() if isinstance(module, nn.Linear))
    linear.register_forward_hook(lambda module, given, out: out - out.mean(0))
    with pytest.raises(ValueError, match="mean"):
        make_towers_plan(piped, encoder, joint.memory.store, mesh)


def test_more_stages_than_the_towers_have_blocks(factory: Joint) -> None:
    settings, joint, _, mesh = factory
    parallel = replace(settings.parallel, pipeline_stages=7, num_microbatches=8, towers="piped")
    with pytest.raises(ValueError, match=r"pipeline_stages is 7, but the towers .* have 6 blocks; use at most 6"):
        make_towers_plan(replace(settings, parallel=parallel), joint.encoder, joint.memory.store, mesh)


def test_ranks_take_the_trace_that_rank_0_has_or_all_trace(factory: Joint, tmp_path: Path) -> None:
    """Rank 1 of two has no cache of its own; it must neither trace alone nor wait alone."""
    settings, joint, reader, _ = factory
    parallel = replace(settings.parallel, trace_cache=str(tmp_path / "traces"))
    cached, batch = replace(settings, parallel=parallel), planned_batch(settings, joint, None)
    sent: list[Any] = []

    class First(Mesh):
        def broadcast(self, value: Any) -> Any:
            sent.append(value)
            return value

    class Second(First):
        is_first = False  # type: ignore[assignment]

        def broadcast(self, value: Any) -> Any:
            return told.pop(0)

    for traced in (True, False):
        sent.clear()
        first = _trace(cached, reader, batch, First(num_stages=1, num_replicas=1))
        assert (sent[0] is None) == traced
        told = list(sent)
        assert _trace(cached, reader, batch, Second(num_stages=1, num_replicas=1)) == first
        assert told == [] and len(list((tmp_path / "traces").iterdir())) == 1


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
