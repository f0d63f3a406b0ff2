"""Devices by name: the presets, and ``this``, the machine that the program runs on."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from pipeline.device import PRESETS, Device
from pipeline.operation_costs import OperationCosts
from pipeline.program import nearest


def device_of(name: str) -> Device:
    """A preset by name; ``this`` measures the CPU it runs on.

    Raises:
        ValueError: for another name; suggests the nearest.
    """
    if name == "this":
        return calibrate()
    if name not in PRESETS:
        names = [*PRESETS, "this"]
        raise ValueError(f"unknown device {name!r}{nearest(name, names)}; allowed: {', '.join(names)}")
    return PRESETS[name]


def calibrate(*, device: str = "cpu", repeats: int = 20) -> Device:
    """Measure this machine with the present number of threads (about half a second on a CPU).

    A product of 384 x 384 matrices gives the peak of each type, the sum of two 16 MB tensors the
    bandwidth, and the forward and backward of a few tiny layers the overhead of an operation; each is the
    shortest of ``repeats``, because other processes only ever make it longer.
    """

    def seconds(function: Callable[[], object]) -> float:
        times = []
        for _ in range(repeats + 2):
            _wait(device)
            start = time.perf_counter()
            function()
            _wait(device)
            times.append(time.perf_counter() - start)
        return min(times[2:])

    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()) for _ in range(4))).to(device)
    x = torch.ones(4, 8, device=device)

    def step() -> None:
        torch.autograd.grad(layers(x).sum(), list(layers.parameters()))

    with OperationCosts() as costs:
        step()
    overhead = seconds(step) / costs.num_operations
    n = 384
    peaks = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        matrix = torch.ones(n, n, device=device, dtype=dtype)
        peaks[dtype] = 2 * n**3 / seconds(lambda matrix=matrix: matrix @ matrix)  # type: ignore[misc]
    large = torch.ones(4 * 2**20, device=device)
    result = torch.empty_like(large)
    bandwidth = 3 * large.nbytes / seconds(lambda: torch.add(large, large, out=result))
    name = f"this {device}, {torch.get_num_threads()} threads"
    return Device(name, peaks[torch.float32], bandwidth, overhead, peaks[torch.bfloat16], peaks[torch.float64])


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
