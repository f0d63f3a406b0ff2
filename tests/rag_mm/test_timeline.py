"""The picture of the last step shows the step that the plan names."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline import partition
from pipeline.cluster import Cluster
from pipeline.config import ParallelConfig
from pipeline.simulate import Event
from rag_mm import run_end
from rag_mm.config import Config
from rag_mm.mesh import Mesh
from tests.pipeline.profiles import random_profile


def test_the_cluster_s_link_is_in_what_the_plan_expects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("link_latency_s: 0.1\nlink_bytes_per_s: 100.0\n")
    parallel = ParallelConfig(pipeline_stages=3, num_microbatches=4, cluster=str(cluster), timeline=True)
    link = Cluster.of(parallel).link
    plan = partition(
        random_profile(7, 4, random.Random(5)), num_stages=3, schedule="1f1b", num_microbatches=4,
        link_latency_s=link.latency_s, link_bytes_per_s=link.bytes_per_s,
    )  # fmt: skip
    drawn: dict[str, list[Event]] = {}
    monkeypatch.setattr(run_end, "write_timeline", lambda path, rows, num_ranks: drawn.update(rows))
    config = replace(Config(), run_dir=str(tmp_path), parallel=parallel)
    pipeline: Any = SimpleNamespace(plan=plan, events=lambda: [Event("forward", 0, 0, 0.0, 1.0)])
    run_end.draw_timeline(config, pipeline, cast(Mesh, SimpleNamespace(is_first=True)), say=lambda line: None)
    assert max(event.end_s for event in drawn["expected by the plan"]) == pytest.approx(plan.step_s)
