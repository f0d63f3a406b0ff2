"""Cluster files, and what of them a configuration overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cluster import Cluster
from pipeline.config import ParallelConfig
from pipeline.device import PRESETS

EXAMPLES = Path(__file__).parents[2] / "configs" / "clusters"


def test_the_example_is_128_devices() -> None:
    cluster = Cluster.load(str(EXAMPLES / "p4d-16.yaml"))
    assert cluster.num_devices == 16 * 8 and cluster.described_device is PRESETS["a100-40gb"]
    assert Cluster(device="h100").capacity_bytes == PRESETS["h100"].memory_bytes
    assert cluster.link.seconds(6.25e9) == pytest.approx(1.0 + cluster.link_latency_s)
    parallel = ParallelConfig(pipeline_stages=16, data_replicas=8, num_microbatches=16)
    path = str(EXAMPLES / "p4d-16.yaml")
    assert Cluster.of(parallel, path=path) == cluster
    with pytest.raises(ValueError, match="is 136, but the cluster has 128 devices"):
        Cluster.of(ParallelConfig(pipeline_stages=17, data_replicas=8, num_microbatches=17), path=path)


def test_the_configuration_s_capacity_goes_first(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("capacity_bytes: 100\nlink_bytes_per_s: 5\n")
    assert Cluster.of(ParallelConfig(cluster=str(path))).capacity_bytes == 100
    cluster = Cluster.of(ParallelConfig(cluster=str(path), capacity_bytes=50.0))
    assert (cluster.capacity_bytes, cluster.link_bytes_per_s) == (50, 5)
    assert Cluster.of(ParallelConfig()) == Cluster()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("link_latency: 1", "unknown key 'link_latency' .did you mean 'link_latency_s'"),
        ("link_latency_s: 1e-3x", "must be a number"),
        ("link_latency_s: -1", "link_latency_s is -1; it must be at least 0"),
        ("link_bytes_per_s: 0", "link_bytes_per_s is 0; it must be above 0"),
        ("capacity_bytes: .nan", "capacity_bytes is nan; it must be above 0"),
        ("device: a100", "device is 'a100' .did you mean '"),
        ("device: 3", "device is 3; it must be a name"),
        ("- 1", "mapping"),
        ("a: [", "not valid YAML"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Cluster.load(str(path))
    with pytest.raises(ValueError, match=r"--cluster no\.yaml"):
        Cluster.load("no.yaml")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chunks": 2}, "chunks is 2 with parallel.schedule 1f1b"),
        ({"schedule": "interleaved"}, "chunks is 1 with parallel.schedule interleaved"),
        (
            {"schedule": "interleaved", "chunks": 2, "pipeline_stages": 2, "num_microbatches": 5},
            "needs a multiple of 2",
        ),
        ({"capacity_bytes": 0.0}, "capacity_bytes is 0.0; it must be above 0"),
        ({"chunks": 0}, "chunks is 0; it must be at least 1"),
    ],
)
def test_configurations_that_no_plan_can_meet(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**fields)  # type: ignore[arg-type]


def test_stages_in_all() -> None:
    assert ParallelConfig(schedule="interleaved", chunks=3, pipeline_stages=2).num_stages == 6
