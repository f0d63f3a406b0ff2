"""Descriptions of devices, for models that are traced without running (on torch's meta device).

An operation takes ``max(flops / peak, bytes / bandwidth) + overhead`` (the roofline of Williams, Waterman
and Patterson, CACM 2009). Presets hold vendors' peak figures (dense, without sparsity); ``efficiency`` is the
share of the peak that matrix products reach, and it is an assumption until somebody measures it:
`pipeline.calibration` does, for the machine it runs on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """What an operation costs on a device.

    Attributes:
        flops_per_s: peak for float32 (two operations a multiply-add).
        bytes_per_s: memory bandwidth.
        overhead_s: fixed cost of one operation (dispatch, kernel launch).
        half_flops_per_s, double_flops_per_s: peaks for 16-bit types and float64 (default: that of float32, and
            half of it).
        efficiency: share of the peak that is reached, in (0, 1].
        memory_bytes: capacity; None if unknown.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    overhead_s: float
    half_flops_per_s: float | None = None
    double_flops_per_s: float | None = None
    efficiency: float = 1.0
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        for field in ("flops_per_s", "bytes_per_s", "half_flops_per_s", "double_flops_per_s", "memory_bytes"):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise ValueError(f"device {self.name!r}: {field} is {value}; it must be above 0")
        if not self.overhead_s >= 0:
            raise ValueError(f"device {self.name!r}: overhead_s is {self.overhead_s}; it must be at least 0")
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"device {self.name!r}: efficiency is {self.efficiency}; it must be in (0, 1]")

    def seconds(self, *, flops: float, num_bytes: float, dtype: torch.dtype) -> float:
        """Time of one operation."""
        peak = self.flops_per_s
        if dtype == torch.float64:
            peak = self.double_flops_per_s or self.flops_per_s / 2
        elif dtype in (torch.float16, torch.bfloat16):
            peak = self.half_flops_per_s or self.flops_per_s
        return max(flops / (peak * self.efficiency), num_bytes / self.bytes_per_s) + self.overhead_s


_GB, _T = 1e9, 1e12
# Data sheets of the vendor (SXM versions); efficiency and overhead are assumptions of this project.
PRESETS: dict[str, Device] = {
    device.name: device
    for device in (
        Device("v100-32gb", 15.7 * _T, 900 * _GB, 5e-6, 125 * _T, 7.8 * _T, 0.5, 32 * _GB),
        Device("a100-40gb", 19.5 * _T, 1555 * _GB, 5e-6, 312 * _T, 9.7 * _T, 0.5, 40 * _GB),
        Device("a100-80gb", 19.5 * _T, 2039 * _GB, 5e-6, 312 * _T, 9.7 * _T, 0.5, 80 * _GB),
        Device("h100", 67 * _T, 3350 * _GB, 5e-6, 989 * _T, 34 * _T, 0.5, 80 * _GB),
        Device("h200", 67 * _T, 4800 * _GB, 5e-6, 989 * _T, 34 * _T, 0.5, 141 * _GB),
    )
}
