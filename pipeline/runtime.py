"""Runs a plan: forward and backward of one batch over the stages, gradients left in ``.grad``.

Several stages run on the schedules of ``torch.distributed.pipelining``; one stage is a plain loop. Either
way each micro-batch's loss is a plain sum of contributions that were divided by global denominators
beforehand, so no cut or split rescales anything.

Choices and their price:

- Batch inputs never go through the library (it splits replicated tensors and wipes gradients of leaves);
  the stage looks its rows up by micro-batch number.
- Shapes of what is sent are found on fake tensors, one runtime (with its receive buffers, for all
  micro-batches) for each signature of input shapes. Few length buckets, or memory grows.
- Before each step the ranks exchange the shapes of their inputs: one small collective, for which a wrong
  batch on one rank becomes the same error on all of them instead of a hang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from pipeline import keyed
from pipeline.boundary import Shape, boundary, carry_shapes
from pipeline.plan_file import SCHEDULES, Plan
from pipeline.program import SAMPLE_ID, BlockProgram, nearest
from pipeline.ties import Ties

LOSSES = "losses"
_LIBRARY_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


@dataclass
class StepResult:
    """Result of `Pipeline.step`.

    Attributes:
        outputs: the program's outputs for the whole batch, detached; None except on the last stage.
    """

    outputs: dict[str, Tensor] | None
    _shapes: dict[str, Shape] = field(repr=False)
    _device: torch.device = field(repr=False)
    _group: dist.ProcessGroup | None = field(repr=False)
    _last_rank: int = field(repr=False)

    def outputs_everywhere(self) -> dict[str, Tensor]:
        """The outputs on every rank of the pipeline (a broadcast: all its ranks must call it)."""
        if self._last_rank == 0:
            assert self.outputs is not None
            return self.outputs
        result = {}
        for name, shape in self._shapes.items():
            tensor = torch.empty(shape.size, dtype=shape.dtype, device=self._device)
            if self.outputs is not None:
                tensor = self.outputs[name].contiguous()
            dist.broadcast(tensor, group=self._group, group_src=self._last_rank)
            result[name] = tensor
        return result


class _Slices:
    """Rows of the batch by micro-batch. Inputs that need gradients become leaves of their own."""

    def __init__(self, program: BlockProgram, batch: Mapping[str, Tensor], names: Sequence[str], count: int) -> None:
        self._program, self._batch = program, batch
        self._leaves: dict[str, list[Tensor]] = {name: [] for name in names if batch[name].requires_grad}
        self.rows: list[dict[str, Tensor]] = []
        for i in range(count):
            rows = {}
            for name in names:
                rows[name] = program.slice_rows(name, batch[name].detach(), i, count)
                if name in self._leaves:
                    # A detached whole tensor shares nothing that in-place work or .grad could spoil.
                    rows[name] = rows[name].detach().requires_grad_()
                    self._leaves[name].append(rows[name])
            self.rows.append(rows)

    def backward(self) -> None:
        """Hand the gradients collected in the slices to the batch's own tensors."""
        roots, grads = [], []
        for name, leaves in self._leaves.items():
            if all(leaf.grad is None for leaf in leaves):
                continue
            parts = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
            whole = self._program.axis(name) is None
            roots.append(self._batch[name])
            grads.append(torch.stack(parts).sum(0) if whole else torch.cat(parts))
        if roots:
            torch.autograd.backward(roots, grads)


class _Stage(nn.Module):
    """The module that the library runs: carry in, carry (or outputs) out. Blocks are not registered in it."""

    def __init__(self, program: BlockProgram, first: int, last: int) -> None:
        super().__init__()
        self._run = lambda env: program.run(env, first, last)
        self._reads, self._writes = program.carry(first), program.carry(last)
        self._is_last = last == len(program.blocks)
        self.rows: list[dict[str, Tensor]] = []
        self.outputs: list[dict[str, Tensor]] = []

    def forward(self, *carry: Tensor, microbatch: int) -> tuple[Tensor, ...]:
        env = {name: boundary(tensor) for name, tensor in zip(self._reads, carry, strict=True)}
        result = self._run({**self.rows[microbatch], **env})
        if self._is_last:
            self.outputs.append({name: tensor.detach() for name, tensor in result.items()})
            return (result[LOSSES].sum(),)
        return tuple(boundary(result[name]) for name in self._writes)


@dataclass
class _Runtime:
    stage: _Stage
    schedule: PipelineScheduleSingle


class Pipeline:
    """One replica's pipeline, seen from one rank.

    The program's output ``losses`` (B, num_objectives) holds each sample's contribution to the loss,
    already divided by denominators of the global batch; the loss is its sum.

    Args:
        program: the whole program, on every rank, with equal parameters.
        plan: blocks of each stage.
        group: ranks of this pipeline, stage by stage (None: all ranks). Unused with one stage.
        num_microbatches, schedule: override the plan's.
        timeout_s: longest wait for another rank within a step (over a process group made for this).

    Attributes:
        stage: index of this rank's stage.
        parameters_here: parameters of this stage by canonical name.
        inputs_here: batch inputs that this stage reads (and ``sample_id``).
        owned: names in ``parameters_here`` that this rank counts in a global norm (of the holders of a
            tied parameter, the first stage counts it).

    Raises:
        ValueError: if plan, group and program do not fit.
    """

    def __init__(
        self,
        program: BlockProgram,
        plan: Plan,
        *,
        group: dist.ProcessGroup | None = None,
        num_microbatches: int | None = None,
        schedule: str | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        plan.validate(program)
        if LOSSES not in program.outputs:
            raise ValueError(f"the program must output {LOSSES!r}{nearest(LOSSES, program.outputs)}")
        self.program, self.plan, self.group = program, plan, group
        self.num_stages = plan.num_stages
        self.num_microbatches = plan.num_microbatches if num_microbatches is None else num_microbatches
        self.schedule = plan.schedule if schedule is None else schedule
        if self.num_microbatches < 1:
            raise ValueError(f"num_microbatches is {self.num_microbatches}; it must be at least 1")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule is {self.schedule!r}; allowed: {', '.join(SCHEDULES)}")
        if self.schedule == "1f1b" and self.num_microbatches < self.num_stages:
            raise ValueError(
                f"num_microbatches is {self.num_microbatches}, fewer than the {self.num_stages} stages; "
                "1f1b needs at least as many (or use gpipe)"
            )
        self.stage = self._join(timeout_s)
        self._bounds = plan.bounds()
        self._first, self._last = self._bounds[self.stage]
        self.inputs_here = program.inputs_of(self._first, self._last)
        self._ties = Ties(program, plan, stage=self.stage, group=self.group)
        holders = self._ties.holders
        names = program.named_parameters_global()
        self.parameters_here = {n: p for n, p in names.items() if self.stage in holders[n]}
        self.owned = frozenset(n for n in self.parameters_here if holders[n][0] == self.stage)
        self.device = next((p.device for p in self.parameters_here.values()), torch.device("cpu"))
        self._runtimes: dict[Any, _Runtime] = {}
        self._output_shapes: dict[Any, dict[str, Shape]] = {}

    def _join(self, timeout_s: float) -> int:
        if self.num_stages == 1:
            return 0
        if not dist.is_initialized():
            raise ValueError(f"the plan has {self.num_stages} stages, but torch.distributed is not initialised")
        size = dist.get_world_size(self.group)
        if size != self.num_stages:
            raise ValueError(f"the plan has {self.num_stages} stages, but its process group has {size} ranks")
        # A group of its own: gloo keeps the timeout that a group was created with (set_timeout has no
        # effect on its sends and receives). Only the pipeline's ranks take part in creating it.
        group = dist.new_group(
            dist.get_process_group_ranks(self.group),
            timeout=timedelta(seconds=timeout_s),
            backend=dist.get_backend(self.group),
            use_local_synchronization=True,
        )
        assert isinstance(group, dist.ProcessGroup)
        self.group = group
        return dist.get_rank(self.group)

    def step(self, batch: Mapping[str, Tensor], *, seed: int, step: int) -> StepResult:
        """Forward and backward of a batch; adds to ``.grad`` of parameters and of inputs that need it.

        Args:
            batch: at least ``inputs_here``, all rows (B) of this replica; the same on every rank. An
                input that requires gradients gets this stage's part: sum over the ranks that read it.
            seed, step: key of the random draws.

        Raises:
            ValueError: on every rank, before anything is sent, if a rank's batch is wrong.
        """
        shapes = self._agree(batch)
        slices = _Slices(self.program, batch, self.inputs_here, self.num_microbatches)
        before = self._ties.set_aside()
        output_shapes: dict[str, Shape] = {}
        with keyed.scope(seed=seed, step=step):
            if self.num_stages == 1:
                outputs = self._run_here(slices)
            else:
                outputs, output_shapes = self._run_stage(slices, shapes)
        self._ties.reduce(before, device=self.device)
        slices.backward()
        joined = None
        if outputs:
            joined = {name: torch.cat([part[name] for part in outputs]) for name in self.program.outputs}
        return StepResult(joined, output_shapes, self.device, self.group, self.num_stages - 1)

    def _agree(self, batch: Mapping[str, Tensor]) -> dict[str, Shape]:
        """Shapes of all program inputs, from all ranks."""
        error, shapes = "", {}
        try:
            shapes = self._check(batch)
        except ValueError as problem:
            error = str(problem)
        if self.num_stages > 1:
            gathered: list[Any] = [None] * self.num_stages
            dist.all_gather_object(gathered, (error, shapes), group=self.group)
            if not error:
                error = next((f"stage {i}: {e}" for i, (e, _) in enumerate(gathered) if e), "")
            shapes = {}
            for stage, (_, theirs) in enumerate(gathered):
                for name, shape in theirs.items():
                    known = shapes.setdefault(name, shape)
                    if (known.size, known.dtype) != (shape.size, shape.dtype) and not error:
                        error = (
                            f"input {name!r} is {shape.size} {shape.dtype} on stage {stage}, "
                            f"elsewhere {known.size} {known.dtype}"
                        )
                    if shape.requires_grad and not known.requires_grad:
                        shapes[name] = shape
        if error:
            raise ValueError(error)
        return shapes

    def _check(self, batch: Mapping[str, Tensor]) -> dict[str, Shape]:
        for name in self.inputs_here:
            if name not in batch:
                raise ValueError(
                    f"the batch lacks input {name!r}, which stage {self.stage} reads{nearest(name, batch)}"
                )
        num_samples = self.program.num_samples(batch)
        if num_samples % self.num_microbatches:
            raise ValueError(
                f"a batch of {num_samples} samples does not divide into "
                f"{self.num_microbatches} micro-batches; "
                "pad it with samples of weight 0 or change num_microbatches"
            )
        # A stage that does not read an input says nothing about its gradient.
        return {
            name: Shape(
                tuple(batch[name].shape),
                batch[name].dtype,
                batch[name].requires_grad and name in self.inputs_here,
            )
            for name in self.program.inputs
            if name in batch
        }

    def _run_here(self, slices: _Slices) -> list[dict[str, Tensor]]:
        outputs = []
        for rows in slices.rows:
            result = self.program.run(rows)
            result[LOSSES].sum().backward()
            outputs.append({name: tensor.detach() for name, tensor in result.items()})
        return outputs

    def _run_stage(
        self, slices: _Slices, shapes: Mapping[str, Shape]
    ) -> tuple[list[dict[str, Tensor]], dict[str, Shape]]:
        key = (
            tuple(sorted(shapes.items())),
            self.program.training,
            torch.is_autocast_enabled(self.device.type),
        )
        if key not in self._runtimes:
            self._runtimes[key], self._output_shapes[key] = self._build(shapes)
        runtime = self._runtimes[key]
        runtime.stage.rows, runtime.stage.outputs = slices.rows, []
        count = self.num_microbatches
        try:
            runtime.schedule.step(
                arg_mbs=[()] * count,
                kwarg_mbs=[{"microbatch": i} for i in range(count)],
                target_mbs=[None] * count,
                return_outputs=False,
            )
            return runtime.stage.outputs, self._output_shapes[key]
        finally:
            runtime.stage.rows, runtime.stage.outputs = [], []

    def _build(self, shapes: Mapping[str, Shape]) -> tuple[_Runtime, dict[str, Shape]]:
        count = self.num_microbatches
        missing = [name for name in self.program.inputs if name not in shapes and name != SAMPLE_ID]
        assert not missing, f"no stage has given {missing}"  # every input is read by some stage
        micro = {}
        for name, shape in shapes.items():
            rows = shape.size if self.program.axis(name) is None else (shape.size[0] // count, *shape.size[1:])
            micro[name] = Shape(rows, shape.dtype, shape.requires_grad)
        carries = carry_shapes(self.program, self._bounds, micro, device=self.device)
        before = carries[self.stage - 1] if self.stage else {}
        module = _Stage(self.program, self._first, self._last)
        if self.stage == self.num_stages - 1:
            loss = carries[-1][LOSSES]
            if not loss.requires_grad:
                raise ValueError(f"output {LOSSES!r} depends on nothing that needs a gradient")
            after = {"loss": Shape((), loss.dtype, True)}
        else:
            after = carries[self.stage]
        stage = PipelineStage(
            module,
            self.stage,
            self.num_stages,
            self.device,
            input_args=tuple(shape.empty("meta") for shape in before.values()),
            output_args=tuple(shape.empty("meta") for shape in after.values()),
            group=self.group,
        )
        schedule = _LIBRARY_SCHEDULES[self.schedule](
            stage, n_microbatches=count, loss_fn=lambda output, _: output[0], scale_grads=False
        )
        outputs = {n: Shape((s.size[0] * count, *s.size[1:]), s.dtype, False) for n, s in carries[-1].items()}
        return _Runtime(module, schedule), outputs

    def check_ties(self) -> None:
        """Compare the copies of tied parameters over the stages, bit for bit (a small collective).

        Raises:
            RuntimeError: naming the first parameter whose copies differ.
        """
        self._ties.check()

    def release_other_stages(self) -> None:
        """Free parameters and buffers that only other stages use (they become meta tensors).

        The program then only runs this stage's blocks. Call it before building an optimiser.
        """
        blocks = self.program.blocks
        keep = {id(t) for b in blocks[self._first : self._last] for t in (*b.module.parameters(), *b.module.buffers())}
        ghosts: dict[int, Tensor] = {}
        for block in (*blocks[: self._first], *blocks[self._last :]):
            for module in block.module.modules():
                for store in (module._parameters, module._buffers):
                    for name, tensor in store.items():
                        if tensor is None or id(tensor) in keep:
                            continue
                        if id(tensor) not in ghosts:
                            ghost: Tensor = tensor.detach().to("meta")
                            if isinstance(tensor, nn.Parameter):
                                ghost = nn.Parameter(ghost, requires_grad=tensor.requires_grad)
                            ghosts[id(tensor)] = ghost
                            keep.add(id(ghost))
                        store[name] = ghosts[id(tensor)]  # type: ignore[assignment]
