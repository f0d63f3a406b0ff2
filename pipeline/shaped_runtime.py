"""A rank's stages on the library's schedule, for one signature of shapes.

Everything that is sent has static shapes, strides and ``requires_grad``, so nothing is inferred by running: the
library's own inference feeds uninitialised memory to later stages. The price is one runtime, with receive buffers for
all micro-batches, for each signature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from pipeline.boundary import Shape
from pipeline.plan_file import Plan
from pipeline.program import BlockProgram
from pipeline.split_backward import why_not_split
from pipeline.stage import LOSSES, Recorder, RecordingStage, StageModule

_SINGLE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_LOOPED: dict[str, Any] = {"interleaved": ScheduleInterleaved1F1B, "zero_bubble": ScheduleInterleavedZeroBubble}


@dataclass
class ShapedRuntime:
    """The modules of this rank's stages, in order, and the schedule that runs them."""

    modules: list[StageModule]
    schedule: PipelineScheduleSingle | PipelineScheduleMulti


def build_runtime(
    program: BlockProgram,
    plan: Plan,
    *,
    stages: Sequence[int],
    carries: Sequence[Mapping[str, Shape]],
    rows: Mapping[str, Tensor],
    schedule: str,
    num_microbatches: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    recorder: Recorder | None,
) -> ShapedRuntime:
    """For this rank's stages (collective for ``zero_bubble``).

    Args:
        carries: shapes of what each stage of the plan sends for a micro-batch; of the outputs for the last.
        rows: batch inputs of one micro-batch.

    Raises:
        ValueError: if no loss needs a gradient, or on every rank if the schedule cannot run the plan.
    """
    loss = carries[-1][LOSSES]
    if not loss.requires_grad:
        raise ValueError(f"output {LOSSES!r} depends on nothing that needs a gradient")
    sent = [*carries[:-1], {"loss": Shape((), loss.dtype, True)}]
    modules, library = [], []
    for s in stages:
        module = StageModule(program, *plan.bounds()[s], recomputed=plan.recomputed)
        stage = (RecordingStage if recorder is not None else PipelineStage)(
            module,
            s,
            plan.num_stages,
            device,
            input_args=tuple(shape.empty("meta") for shape in (sent[s - 1].values() if s else ())),
            output_args=tuple(shape.empty("meta") for shape in sent[s].values()),
            group=group,
        )
        if isinstance(stage, RecordingStage):
            assert recorder is not None
            stage.recorder = recorder
        modules.append(module)
        library.append(stage)
    how: dict[str, Any] = {
        "n_microbatches": num_microbatches, "loss_fn": lambda output, _: output[0], "scale_grads": False
    }  # fmt: skip
    if schedule == "zero_bubble":
        _check_split_backward(dict(zip(stages, modules, strict=True)), sent, rows, device=device, group=group)
    if schedule in _LOOPED:
        return ShapedRuntime(modules, _LOOPED[schedule](library, **how))
    return ShapedRuntime(modules, _SINGLE[schedule](library[0], **how))


def _check_split_backward(
    modules: Mapping[int, StageModule],
    sent: Sequence[Mapping[str, Shape]],
    rows: Mapping[str, Tensor],
    *,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> None:
    """Refuse, on every rank, what a split backward would get wrong (collective)."""
    reasons = []
    for s, module in modules.items():
        reason = why_not_split(module, list(sent[s - 1].values()) if s else [], rows, device=device)
        reasons += [f"stage {s}: {reason}"] if reason else []
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, reasons, group=group)
    found = [reason for theirs in gathered for reason in theirs]
    if found:
        raise ValueError(
            f"schedule zero_bubble cannot run this plan; {'; '.join(found)}. Cut elsewhere (docs/pipeline.md says "
            "what it needs) or use the schedule interleaved"
        )
