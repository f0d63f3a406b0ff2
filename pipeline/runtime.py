"""Runs a plan: forward and backward of one batch over the ranks, gradients left in ``.grad``.

Several ranks run on the schedules of ``torch.distributed.pipelining``; one rank is a plain loop. Either
way each micro-batch's loss is a plain sum of contributions that were divided by global denominators
beforehand, so no cut or split rescales anything.

Choices and their price:

- Batch inputs never go through the library (it splits replicated tensors and wipes gradients of leaves);
  the stage looks its rows up by micro-batch number.
- Shapes of what is sent are found on fake tensors, one runtime (`pipeline.shaped_runtime`, with its receive buffers for
  all micro-batches) for each signature of input shapes. Few length buckets, or memory grows.
- Before each step the ranks exchange the shapes of their inputs: one small collective, for which a wrong
  batch on one rank becomes the same error on all of them instead of a hang.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline import keyed, wire
from pipeline.agreement import agreed_shapes
from pipeline.boundary import Shape, carry_shapes
from pipeline.forward import run_forward
from pipeline.ghosts import make_ghosts
from pipeline.plan_file import Plan, check_schedule
from pipeline.program import SAMPLE_ID, BlockProgram, nearest
from pipeline.roll_call import RollCall
from pipeline.shaped_runtime import ShapedRuntime, build_runtime
from pipeline.simulate import Event
from pipeline.stage import LOSSES, Recorder, Slices
from pipeline.ties import Ties


@dataclass
class StepResult:
    """Result of `Pipeline.step` and `Pipeline.forward`.

    Attributes:
        outputs: the program's outputs for the whole batch, detached; None except on the rank of the last stage.
    """

    outputs: dict[str, Tensor] | None
    _pipeline: Pipeline = field(repr=False)

    def outputs_everywhere(self) -> dict[str, Tensor]:
        """The outputs on every rank of the pipeline (a broadcast: all its ranks must call it)."""
        pipeline = self._pipeline
        if pipeline.num_ranks == 1:
            assert self.outputs is not None
            return self.outputs
        return wire.broadcast(
            self.outputs,
            pipeline.program.outputs,
            source=pipeline.plan.last_rank,
            group=pipeline.group,
            device=pipeline.device,
        )


class Pipeline:
    """One replica's pipeline, seen from one rank.

    To train, the program's output ``losses`` (B, num_objectives) holds each sample's contribution to the
    loss, already divided by denominators of the global batch; the loss is its sum.

    Args:
        program: the whole program, on every rank, with equal parameters.
        plan: blocks of each stage, and how many ranks they run on.
        group: ranks of this pipeline, in order (None: all ranks). Unused with one rank.
        num_microbatches, schedule: override the plan's.
        timeout_s: longest wait for another rank within a step (over a process group made for this).
        record: measure when each stage computes; see ``events``.

    Attributes:
        rank, num_ranks: of this pipeline.
        stages_here: the stages that this rank runs.
        parameters_here: parameters of these stages by canonical name.
        inputs_here: batch inputs that these stages read (and ``sample_id``).
        owned: names in ``parameters_here`` that this rank counts in a global norm (of the holders of a
            tied parameter, the first rank counts it).

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
        record: bool = False,
    ) -> None:
        plan.validate(program)
        self.program, self.plan, self.group = program, plan, group
        self.num_ranks = plan.num_ranks
        self.num_microbatches = plan.num_microbatches if num_microbatches is None else num_microbatches
        self.schedule = plan.schedule if schedule is None else schedule
        check_schedule(
            self.schedule,
            num_microbatches=self.num_microbatches,
            num_ranks=plan.num_ranks,
            num_stages=plan.num_stages,
        )
        self.rank = self._join(timeout_s)
        self.stages_here = plan.stages_of(self.rank)
        self._bounds = plan.bounds()
        needed = [program.inputs_of(*self._bounds[s], recomputed=plan.recomputed) for s in self.stages_here]
        self.inputs_here = tuple(dict.fromkeys(name for names in needed for name in names))
        self._ties = Ties(program, plan, rank=self.rank, group=self.group)
        holders = self._ties.holders
        names = program.named_parameters_global()
        self.parameters_here = {n: p for n, p in names.items() if self.rank in holders[n]}
        self.owned = frozenset(n for n in self.parameters_here if holders[n][0] == self.rank)
        self.device = next((p.device for p in self.parameters_here.values()), torch.device("cpu"))
        self._roll_call = RollCall(self.group) if self.num_ranks > 1 and self.group is not None else None
        self._recorder = Recorder() if record else None
        self._runtimes: dict[Any, ShapedRuntime] = {}

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank runs the last stage, and so has the outputs."""
        return self.rank == self.plan.last_rank

    def _join(self, timeout_s: float) -> int:
        if self.num_ranks == 1:
            return 0
        if not dist.is_initialized():
            raise ValueError(f"the plan has {self.num_ranks} ranks, but torch.distributed is not initialised")
        size = dist.get_world_size(self.group)
        if size != self.num_ranks:
            raise ValueError(f"the plan has {self.num_ranks} ranks, but its process group has {size}")
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
                input that requires gradients gets this rank's part: sum over the ranks that read it.
            seed, step: key of the random draws.

        Raises:
            ValueError: on every rank, before anything is sent, if a rank's batch is wrong.
            RuntimeError: if another rank died (names it) or does not answer within the timeout.
        """
        if LOSSES not in self.program.outputs:
            raise ValueError(
                f"the program has no output {LOSSES!r}{nearest(LOSSES, self.program.outputs)}, so there is nothing "
                "to minimise; forward() runs it without gradients"
            )
        with self.watched():
            return self._step(batch, seed=seed, step=step)

    def watched(self) -> AbstractContextManager[None]:
        """Within it, the error of a lost connection names the rank that died."""
        return nullcontext() if self._roll_call is None else self._roll_call.names_the_dead()

    def _step(self, batch: Mapping[str, Tensor], *, seed: int, step: int) -> StepResult:
        shapes = self.agree(batch)
        slices = Slices(self.program, batch, self.inputs_here, self.num_microbatches)
        before = self._ties.set_aside()
        if self._recorder is not None:
            self._recorder.start()
        with keyed.scope(seed=seed, step=step):
            if self.num_ranks == 1:
                outputs = self._run_here(slices)
            else:
                outputs = self._run_stages(slices, shapes)
        self._ties.reduce(before, device=self.device)
        slices.backward()
        joined = None
        if outputs:
            joined = {name: torch.cat([part[name] for part in outputs]) for name in self.program.outputs}
        return StepResult(joined, self)

    def forward(self, batch: Mapping[str, Tensor], *, seed: int = 0, step: int = 0) -> StepResult:
        """The program's outputs for a batch, without gradients; for evaluation.

        Any number of samples will do: as many micro-batches are used as divide them, up to the plan's.

        Args:
            batch: at least ``inputs_here``, all rows (B); the same on every rank.
            seed, step: key of the random draws, if the program is in training mode.

        Raises:
            ValueError: on every rank, before anything is sent, if a rank's batch is wrong.
        """
        with self.watched(), keyed.scope(seed=seed, step=step):
            self.agree(batch, divides=False)
            num_samples = self.program.num_samples(batch)
            count = max(m for m in range(1, self.num_microbatches + 1) if num_samples % m == 0)
            return StepResult(run_forward(self, batch, num_microbatches=count), self)

    def agree(self, batch: Mapping[str, Tensor], *, divides: bool = True) -> dict[str, Shape]:
        """Shapes of all program inputs, from all ranks (collective; see `pipeline.agreement`).

        Args:
            divides: the batch must divide into the micro-batches.
        """
        return agreed_shapes(
            batch, program=self.program, plan=self.plan, rank=self.rank, needed=self.inputs_here, group=self.group,
            num_microbatches=self.num_microbatches if divides else None,
        )  # fmt: skip

    def _run_here(self, slices: Slices) -> list[dict[str, Tensor]]:
        outputs = []
        for i, rows in enumerate(slices.rows):
            if self._recorder is None:
                result = self.program.run(rows)
                result[LOSSES].sum().backward()
            else:
                result = self._recorder.timed("forward", 0, i, lambda rows=rows: self.program.run(rows))  # type: ignore[misc]
                self._recorder.timed("backward", 0, i, result[LOSSES].sum().backward)
            outputs.append({name: tensor.detach() for name, tensor in result.items()})
        return outputs

    def _run_stages(self, slices: Slices, shapes: Mapping[str, Shape]) -> list[dict[str, Tensor]]:
        key = (
            tuple(sorted(shapes.items())),
            self.program.training,
            torch.is_autocast_enabled(self.device.type),
        )
        if key not in self._runtimes:
            self._runtimes[key] = self._build(shapes, slices.rows[0])
        runtime = self._runtimes[key]
        for module in runtime.modules:
            module.rows, module.outputs = slices.rows, []
        count = self.num_microbatches
        try:
            runtime.schedule.step(
                arg_mbs=[()] * count,
                kwarg_mbs=[{"microbatch": i} for i in range(count)],
                target_mbs=[None] * count,
                return_outputs=False,
            )
            return runtime.modules[-1].outputs
        finally:
            for module in runtime.modules:
                module.rows, module.outputs = [], []

    def microbatch_shapes(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Shapes of one micro-batch of the inputs, from those of the batch."""
        count, micro = self.num_microbatches, {}
        for name, shape in shapes.items():
            rows = shape.size if self.program.axis(name) is None else (shape.size[0] // count, *shape.size[1:])
            micro[name] = Shape(rows, shape.dtype, shape.requires_grad)
        return micro

    def carries(self, shapes: Mapping[str, Shape]) -> list[dict[str, Shape]]:
        """Shapes of what each stage sends for a micro-batch; of the outputs for the last."""
        missing = [name for name in self.program.inputs if name not in shapes and name != SAMPLE_ID]
        assert not missing, f"no rank has given {missing}"  # every input is read by some stage
        return carry_shapes(
            self.program,
            self._bounds,
            self.microbatch_shapes(shapes),
            device=self.device,
            recomputed=self.plan.recomputed,
        )

    def _build(self, shapes: Mapping[str, Shape], rows: Mapping[str, Tensor]) -> ShapedRuntime:
        return build_runtime(
            self.program, self.plan, stages=self.stages_here, carries=self.carries(shapes), rows=rows,
            schedule=self.schedule, num_microbatches=self.num_microbatches, device=self.device, group=self.group,
            recorder=self._recorder,
        )  # fmt: skip

    def events(self) -> list[Event]:
        """When the stages of all ranks computed in the last step, with ``record`` (a collective).

        Times are seconds since the first rank began its step, by the clocks of the ranks' machines.

        Raises:
            ValueError: without ``record``.
        """
        if self._recorder is None:
            raise ValueError("nothing was recorded; make the pipeline with record=True")
        mine = (self._recorder.began, self._recorder.events)
        gathered: list[Any] = [mine]
        if self.num_ranks > 1:
            gathered = [None] * self.num_ranks
            dist.all_gather_object(gathered, mine, group=self.group)
        first = min(began for began, _ in gathered)
        later = (
            replace(event, start_s=event.start_s + began - first, end_s=event.end_s + began - first)
            for began, events in gathered
            for event in events
        )
        return sorted(later, key=lambda e: (e.start_s, e.stage))

    def check_ties(self) -> None:
        """Compare the copies of tied parameters over the ranks, bit for bit (a small collective).

        Raises:
            RuntimeError: naming the first parameter whose copies differ.
        """
        self._ties.check()

    def release_other_stages(self) -> None:
        """Free parameters and buffers that only other ranks use (they become meta tensors).

        The program then only runs this rank's stages. Call it before building an optimiser.
        """
        here = {name for stage in self.stages_here for name in self.plan.stages[stage].blocks}
        for s in self.stages_here:
            here |= {block.name for block in self.program.rerun(*self._bounds[s], recomputed=self.plan.recomputed)}
        mine = [block for block in self.program.blocks if block.name in here]
        keep = [t for block in mine for t in (*block.module.parameters(), *block.module.buffers())]
        make_ghosts([block.module for block in self.program.blocks if block.name not in here], keep=keep)
