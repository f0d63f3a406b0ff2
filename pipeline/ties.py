"""Parameters held by several ranks: one gradient, one count in the norm, equal copies.

The ranks of a tie keep copies, and the sum of their gradients goes to all of them after the backward,
in one flat all-reduce over the pipeline in which ranks without a copy contribute zeros. That sends more
than a group for each set of holders would, and needs no further process groups.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.plan_file import Plan
from pipeline.program import BlockProgram


class Ties:
    """The tied parameters of a plan, seen from one rank.

    Attributes:
        holders: for every parameter of the program, the ranks that hold it, in order of their stages.
    """

    def __init__(self, program: BlockProgram, plan: Plan, *, rank: int, group: dist.ProcessGroup | None) -> None:
        self._program, self._rank, self._group = program, rank, group
        self._num_ranks = plan.num_ranks
        self.holders: dict[str, list[int]] = {name: [] for name in program.named_parameters_global()}
        for index, ((first, last), stage_plan) in enumerate(zip(plan.bounds(), plan.stages, strict=True)):
            again = program.rerun(first, last, recomputed=plan.recomputed)
            blocks = (*(block.name for block in again), *stage_plan.blocks)
            for name in {n for block in blocks for n in program.block_parameters(block)}:
                if index % plan.num_ranks not in self.holders[name]:
                    self.holders[name].append(index % plan.num_ranks)

    def _tied(self) -> dict[str, torch.nn.Parameter]:
        names = self._program.named_parameters_global()
        return {n: p for n, p in names.items() if len(self.holders[n]) > 1 and p.requires_grad}

    def set_aside(self) -> dict[str, Tensor | None]:
        """Take away what tied parameters have accumulated before: it is reduced already."""
        before = {}
        for name, parameter in self._tied().items():
            before[name], parameter.grad = parameter.grad, None
        return before

    def reduce(self, before: Mapping[str, Tensor | None], *, device: torch.device) -> None:
        """Give every holder the sum of the holders' gradients, on top of ``before`` (collective)."""
        tied = self._tied()
        for dtype in dict.fromkeys(p.dtype for p in tied.values()):
            chosen = {n: p for n, p in tied.items() if p.dtype == dtype}
            parts = []
            for p in chosen.values():
                have = p.grad is not None
                parts.append(
                    p.grad.reshape(-1) if p.grad is not None else torch.zeros(p.numel(), dtype=dtype, device=device)
                )
                parts.append(torch.full((1,), float(have), dtype=dtype, device=device))
            flat = torch.cat(parts)
            dist.all_reduce(flat, group=self._group)
            offset = 0
            for name, p in chosen.items():
                total, touched = flat[offset : offset + p.numel()], flat[offset + p.numel()]
                offset += p.numel() + 1
                old = before[name]
                if self._rank not in self.holders[name]:
                    p.grad = None
                elif touched > 0:
                    grad = total.view(p.shape).clone()
                    p.grad = grad if old is None else old.add_(grad)
                else:  # reached no gradient anywhere
                    p.grad = old

    def check(self) -> None:
        """Compare the copies bit for bit (a small collective).

        Raises:
            RuntimeError: naming the first parameter whose copies differ.
        """
        if self._num_ranks == 1:
            return
        names = self._program.named_parameters_global()
        tied = {name: ranks for name, ranks in self.holders.items() if len(ranks) > 1}
        mine = {name: _digest(names[name]) for name, ranks in tied.items() if self._rank in ranks}
        gathered: list[Any] = [None] * self._num_ranks
        dist.all_gather_object(gathered, mine, group=self._group)
        for name, ranks in tied.items():
            if len({gathered[rank][name] for rank in ranks}) > 1:
                raise RuntimeError(f"copies of tied parameter {name!r} differ between ranks {ranks}")


def _digest(tensor: Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(raw, digest_size=8).hexdigest()
