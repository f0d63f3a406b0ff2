"""Who computes what: the mesh of data replicas and pipeline stages, and sums over parts of it.

Ranks are laid out replica by replica: rank = replica * stages + stage. Without torch.distributed (one
rank) every reduction is the identity, so the same code runs on one process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Mesh:
    """This rank's place, and the groups it belongs to.

    Attributes:
        rank, size: in the whole mesh.
        stage, replica: along the axes ``pp`` and ``dp``.
        pipeline: group of the stages of this replica, in order (None on one rank).
        replicas: group of the copies of this stage (None on one rank).
    """

    def __init__(self, *, num_stages: int, num_replicas: int) -> None:
        self.num_stages, self.num_replicas = num_stages, num_replicas
        self.size = num_stages * num_replicas
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world != self.size:
            raise ValueError(
                f"parallel.pipeline_stages x parallel.data_replicas is {num_stages} x {num_replicas} = {self.size}, "
                f"but {world} ranks were started"
            )
        self.replica, self.stage = divmod(self.rank, num_stages)
        self.pipeline: Any = None
        self.replicas: Any = None
        if self.size > 1:
            for replica in range(num_replicas):
                group = dist.new_group([replica * num_stages + stage for stage in range(num_stages)])
                self.pipeline = group if replica == self.replica else self.pipeline
            for stage in range(num_stages):
                group = dist.new_group([replica * num_stages + stage for replica in range(num_replicas)])
                self.replicas = group if stage == self.stage else self.replicas

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def on_one_machine(self) -> bool:
        """Whether torchrun started all ranks on this machine; taken to be so where something else started them."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.size)) >= self.size

    def sum(self, tensors: Iterable[Tensor], *, group: Any = None) -> None:
        """Replace tensors by their sums over a group (default: all ranks), in place, in one message."""
        if self.size == 1:
            return
        tensors = list(tensors)
        if tensors:
            flat = torch.cat([t.reshape(-1) for t in tensors])
            dist.all_reduce(flat, group=group)
            for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))

    @contextmanager
    def summed_gradients(self, parameters: Iterable[nn.Parameter], *, group: Any = None) -> Iterator[None]:
        """Sum over a group (default: all ranks) the gradients that are made within, and add them to those before."""
        trained = list(parameters)
        before = [parameter.grad for parameter in trained]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        yield
        self.sum([parameter.grad for parameter in trained if parameter.grad is not None], group=group)
        for parameter, old in zip(trained, before, strict=True):
            if old is not None and parameter.grad is not None:
                parameter.grad += old

    def broadcast(self, value: Any) -> Any:
        """Rank 0's Python value, everywhere."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's Python value, everywhere, in order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()

    def rows(self, count: int) -> Tensor:
        """Rows of a table of ``count`` rows that this rank works on: every ``size``-th one."""
        return torch.arange(count)[self.rank :: self.size]

    def join_rows(self, part: Tensor, count: int) -> Tensor:
        """The whole table (count, ...) from every rank's rows; each row is computed on one rank alone."""
        if self.size == 1:
            return part
        whole = part.new_zeros(count, *part.shape[1:])
        whole[self.rows(count)] = part
        dist.all_reduce(whole)
        return whole
