"""What one rank runs of a plan: rows of the batch by micro-batch, and its stages as the library sees them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from pipeline.boundary import boundary
from pipeline.program import BlockProgram
from pipeline.simulate import Event

LOSSES = "losses"


class Slices:
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


class StageModule(nn.Module):
    """The module that the library runs: carry in, carry (or the loss) out.

    It holds the blocks' modules, because a schedule that splits the backward asks for their parameters.
    """

    def __init__(self, program: BlockProgram, first: int, last: int, *, recomputed: Collection[str]) -> None:
        super().__init__()
        self._run = lambda env: program.run(env, first, last, recomputed=recomputed)
        again = program.rerun(first, last, recomputed=recomputed)
        self.blocks = nn.ModuleList(block.module for block in (*again, *program.blocks[first:last]))
        self._reads = program.carry(first, recomputed=recomputed)
        self._writes = program.carry(last, recomputed=recomputed)
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


class Recorder:
    """Measured events of one step, in seconds since this rank began it.

    Attributes:
        began: when that was, by the machine's clock (s), which ranks have in common.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Forget the last step; this moment is 0."""
        self.events: list[Event] = []
        self.began, self._start = time.time(), time.perf_counter()

    def timed(self, kind: str, stage: int, microbatch: int, work: Callable[[], Any]) -> Any:
        """Do the work and note when it was done."""
        begin = time.perf_counter() - self._start
        result = work()
        self.events.append(Event(kind, stage, microbatch, begin, time.perf_counter() - self._start))
        return result


class RecordingStage(PipelineStage):
    """The library's stage, noting when it computes (on a GPU: when it queues)."""

    recorder: Recorder

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        work = super().forward_one_chunk
        return self.recorder.timed(
            "forward", self.stage_index, fwd_chunk_id, lambda: work(fwd_chunk_id, *args, **kwargs)
        )

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        work = super().backward_one_chunk
        return self.recorder.timed(
            "backward", self.stage_index, bwd_chunk_id, lambda: work(bwd_chunk_id, *args, **kwargs)
        )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        work = super().backward_weight_one_chunk
        return self.recorder.timed(
            "backward_weight", self.stage_index, bwd_chunk_id, lambda: work(bwd_chunk_id, *args, **kwargs)
        )
