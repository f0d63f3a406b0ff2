"""What connects the ranks of a pipeline and what a device holds: a small YAML file.

Written for one pipeline, so the link is the slowest that a pipeline crosses: between machines where it spans
several. Bandwidth is what a single pair of ranks gets, in one direction.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from pipeline.config import ParallelConfig
from pipeline.costs import Link
from pipeline.device import PRESETS, Device
from pipeline.program import nearest


@dataclass(frozen=True)
class Cluster:
    """The keys of a cluster file.

    Attributes:
        link_latency_s: seconds a message takes before its first byte.
        link_bytes_per_s: of one direction between neighbouring ranks.
        capacity_bytes: memory of a device that the plan may use (None: any).
        num_devices: devices in all; the pipeline's ranks must not be more (None: any number).
        device: what they are (`pipeline.device.PRESETS`): the command then predicts for them, from operations and
            bytes, without running the model; empty: this machine, measured. Gives ``capacity_bytes`` if that is None.
    """

    link_latency_s: float = 0.0
    link_bytes_per_s: float = float("inf")
    capacity_bytes: float | None = None
    num_devices: int | None = None
    device: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "device":
                continue
            optional = field.default is None and value is None
            if not optional and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError(f"cluster: {field.name} is {value!r}; it must be a number (write 1.0e9, not 1e9)")
            if value is not None and field.name != "link_latency_s" and not value > 0:
                raise ValueError(f"cluster: {field.name} is {value}; it must be above 0")
        if not self.link_latency_s >= 0:
            raise ValueError(f"cluster: link_latency_s is {self.link_latency_s}; it must be at least 0")
        if not isinstance(self.device, str):
            raise ValueError(f"cluster: device is {self.device!r}; it must be a name")
        if self.device and self.device not in PRESETS:
            raise ValueError(
                f"cluster: device is {self.device!r}{nearest(self.device, PRESETS)}; allowed: {', '.join(PRESETS)}"
            )
        if self.device and self.capacity_bytes is None:
            object.__setattr__(self, "capacity_bytes", PRESETS[self.device].memory_bytes)

    @property
    def link(self) -> Link:
        return Link(self.link_latency_s, self.link_bytes_per_s)

    @property
    def described_device(self) -> Device | None:
        """What the times are for; None: this machine."""
        return PRESETS[self.device] if self.device else None

    def require_devices(self, num_ranks: int) -> None:
        """Refuse more ranks than there are devices.

        Raises:
            ValueError: saying both numbers.
        """
        if self.num_devices is not None and num_ranks > self.num_devices:
            raise ValueError(
                f"parallel.pipeline_stages x parallel.data_replicas is {num_ranks}, but the cluster has "
                f"{self.num_devices:g} devices (num_devices); use fewer"
            )

    @classmethod
    def load(cls, path: str, *, option: str = "--cluster") -> Cluster:
        """Read a file.

        Raises:
            ValueError: if it cannot be read or a key is unknown or of the wrong type.
        """
        data = load_yaml(path, option)
        known = [field.name for field in fields(cls)]
        for key in data:
            if key not in known:
                raise ValueError(f"{path}: unknown key {key!r}{nearest(str(key), known)}; allowed: {', '.join(known)}")
        return cls(**data)

    @classmethod
    def of(cls, parallel: ParallelConfig, *, path: str = "") -> Cluster:
        """What a configuration says, or the file at ``path`` instead of ``parallel.cluster``.

        ``parallel.capacity_bytes`` goes before the file's.
        """
        cluster = cls()
        if path:
            cluster = cls.load(path)
        elif parallel.cluster:
            cluster = cls.load(parallel.cluster, option="parallel.cluster")
        if parallel.capacity_bytes is not None:
            cluster = replace(cluster, capacity_bytes=parallel.capacity_bytes)
        cluster.require_devices(parallel.pipeline_stages * parallel.data_replicas)
        return cluster


def load_yaml(path: str, option: str) -> dict[str, Any]:
    """A YAML file's mapping; ``option`` says in errors where the path came from.

    Raises:
        ValueError: if it cannot be read or is something else.
    """
    try:
        data = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{option} {path}: not valid YAML ({' '.join(str(error).split())})") from error
    if not isinstance(data, dict):
        raise ValueError(f"{option} {path}: must hold a mapping of keys to values")
    return data
