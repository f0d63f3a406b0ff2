"""Times predicted from FLOPs and bytes, where the right value is known or can be measured."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeline import Block, BlockProgram, trace
from pipeline.calibration import calibrate, device_of
from pipeline.device import PRESETS, Device
from tests.pipeline.fid_program import fid_batch, fid_program

WIDTHS = (128, 512, 2048)


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(64, width), nn.Linear(width, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


def mlp_program() -> BlockProgram:
    blocks = [Block(f"mlp.{width}", MLP(width), ("h" if i else "x",), ("h",)) for i, width in enumerate(WIDTHS)]
    return BlockProgram(blocks, inputs=("x",), outputs=("h",))


def test_a_product_takes_what_the_roofline_says() -> None:
    with torch.device("meta"):
        program = BlockProgram(
            [Block("b", nn.Linear(512, 2048, bias=False), ("x",), ("losses",))], inputs=("x",), outputs=("losses",)
        )
        batch = {"x": torch.empty(4, 512)}
    num_bytes = (4 * 512 + 512 * 2048 + 4 * 2048) * 4
    flops = 2 * 4 * 512 * 2048
    for device, right in (
        (Device("slow memory", 1e15, 1e9, 1e-6), num_bytes / 1e9 + 1e-6),
        (Device("slow arithmetic", 1e9, 1e15, 1e-6, efficiency=0.5), flops / 0.5e9 + 1e-6),
    ):
        profile = trace(program, batch, num_microbatches=1, lineage=False, device=device)
        block = profile.blocks[0]
        assert block.forward_s == pytest.approx(right) and block.flops == flops and block.bytes_moved == num_bytes
        assert profile.device == device.name and block.lineage == "unknown"


def test_meta_counts_what_a_real_run_counts() -> None:
    """Bytes, FLOPs, saved activations and ties of the fusion-in-decoder program, without a value in it."""
    real = trace(fid_program(), fid_batch(6), num_microbatches=3, repeats=1, lineage=False)
    program = fid_program().to("meta")
    batch = {name: tensor.to("meta") for name, tensor in fid_batch(6).items()}
    batch["scores"].requires_grad_()
    meta = trace(program, batch, num_microbatches=3, lineage=False, device=PRESETS["a100-40gb"])
    assert meta.carry_bytes == real.carry_bytes and meta.gradient_bytes == real.gradient_bytes
    for here, there in zip(meta.blocks, real.blocks, strict=True):
        assert (here.flops, here.backward_flops, here.activation_bytes, here.written_bytes, here.parameter_bytes) == (
            there.flops, there.backward_flops, there.activation_bytes, there.written_bytes, there.parameter_bytes
        ), here.name  # fmt: skip
        assert here.ties == there.ties and here.forward_s > 0


def test_types_have_peaks_of_their_own() -> None:
    a100 = PRESETS["a100-40gb"]
    times = [a100.seconds(flops=1e15, num_bytes=0, dtype=t) for t in (torch.float64, torch.float32, torch.bfloat16)]
    assert times[0] == pytest.approx(1e15 / 4.85e12, rel=1e-3) and times[2] == pytest.approx(1e15 / 156e12, rel=1e-3)
    assert times[0] > times[1] > times[2]


def test_prediction_for_this_machine() -> None:
    """Calibrated here and now: the same order of blocks, each within a factor of five of measured.

    Of each block the shortest of 40 runs counts: other processes only ever make it longer. (Measured
    on one x86 core: see docs/lineage.md.)
    """
    torch.manual_seed(0)
    program, batch = mlp_program(), {"x": torch.randn(1024, 64)}
    device = calibrate(repeats=40)
    runs = [trace(program, batch, num_microbatches=1, repeats=1, lineage=False).blocks for _ in range(40)]
    measured = [min(run[i].forward_s + run[i].backward_s for run in runs) for i in range(len(WIDTHS))]
    with torch.device("meta"):
        program, batch = mlp_program(), {"x": torch.empty(1024, 64)}
    blocks = trace(program, batch, num_microbatches=1, lineage=False, device=device).blocks
    predicted = [block.forward_s + block.backward_s for block in blocks]
    assert predicted == sorted(predicted) and measured == sorted(measured)
    for width, p, m in zip(WIDTHS, predicted, measured, strict=True):
        print(f"width {width}: predicted {p:.2e} s, measured {m:.2e} s, ratio {p / m:.2f}")
        assert 1 / 5 < p / m < 5, f"width {width}: predicted {p:.2e} s, measured {m:.2e} s"


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x[:, 0] > 0]


def test_mistakes() -> None:
    with pytest.raises(ValueError, match=r"unknown device 'a100-40' \(did you mean 'a100-40gb'\?\)"):
        device_of("a100-40")
    with pytest.raises(ValueError, match="bytes_per_s is 0; it must be above 0"):
        Device("d", 1e12, 0, 0)
    with pytest.raises(ValueError, match=r"efficiency is 1\.5"):
        Device("d", 1e12, 1e9, 0, efficiency=1.5)
    with pytest.raises(ValueError, match="the program has values"):
        trace(fid_program(), fid_batch(), num_microbatches=3, lineage=False, device=PRESETS["h100"])
    program = fid_program().to("meta")
    with pytest.raises(ValueError, match="put program and batch on one device"):
        trace(program, fid_batch(), num_microbatches=3, lineage=False, device=PRESETS["h100"])
    batch = {name: tensor.to("meta") for name, tensor in fid_batch().items()}
    with pytest.raises(ValueError, match="say what to predict for"):
        trace(program, batch, num_microbatches=3, lineage=False)
    with pytest.raises(ValueError, match="lineage needs values"):
        trace(program, batch, num_microbatches=3, device=PRESETS["h100"])
    program = BlockProgram([Block("branch", Branch(), ("x",), ("losses",))], inputs=("x",), outputs=("losses",))
    with pytest.raises(ValueError, match="block 'branch' cannot be traced on the meta device"):
        trace(
            program, {"x": torch.empty(4, 2, device="meta")}, num_microbatches=1, lineage=False, device=PRESETS["h100"]
        )
