"""The processes that do one job together, or this one alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """This process among those that build together."""

    rank: int = 0
    count: int = 1

    @classmethod
    def here(cls) -> Ranks:
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else cls()

    def wait(self) -> None:
        """For all of them."""
        if self.count > 1:
            dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in order."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values
