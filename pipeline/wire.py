"""Named tensors from rank to rank by plain sends, with their shapes in front.

Training knows every shape beforehand and uses the library's buffers; what is evaluated or generated has
shapes that grow, so each message begins with one small tensor of fixed size that says what follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

MAX_DIMS = 8
_WIDTH = MAX_DIMS + 2  # dtype, number of dimensions, sizes
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def header(tensors: Sequence[Tensor]) -> Tensor:
    """Shapes and types as int64, (len(tensors), 10).

    Raises:
        ValueError: for a tensor of more than 8 dimensions or of a type that is not sent.
    """
    rows = torch.zeros(len(tensors), _WIDTH, dtype=torch.int64)
    for i, tensor in enumerate(tensors):
        if tensor.dim() > MAX_DIMS or tensor.dtype not in _DTYPES:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} and type {tensor.dtype} cannot be sent between stages; "
                f"at most {MAX_DIMS} dimensions of a plain real type"
            )
        sizes = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        rows[i, : len(sizes)] = torch.tensor(sizes)
    return rows


def empty(described: Tensor, *, device: torch.device) -> list[Tensor]:
    """Tensors of the shapes and types that a `header` describes."""
    return [
        torch.empty(row[2 : 2 + row[1]], dtype=_DTYPES[row[0]], device=device)
        for row in (list(map(int, line)) for line in described.tolist())
    ]


class Outbox:
    """Sends under way; holds their tensors until they have left."""

    def __init__(self) -> None:
        self._works: list[tuple[dist.Work | None, Tensor]] = []

    def send(self, tensors: Sequence[Tensor], *, to: int, group: dist.ProcessGroup | None) -> None:
        """Send tensors to a rank of the group, without waiting."""
        values = [tensor.detach().contiguous() for tensor in tensors]
        device = values[0].device if values else torch.device("cpu")
        for tensor in (header(values).to(device), *values):
            self._works.append((dist.isend(tensor, group=group, group_dst=to), tensor))

    def wait(self) -> None:
        """Until everything has left."""
        for work, _ in self._works:
            if work is not None:
                work.wait()
        self._works.clear()


def receive(count: int, *, source: int, group: dist.ProcessGroup | None, device: torch.device) -> list[Tensor]:
    """The ``count`` tensors that the source sends next."""
    described = torch.zeros(count, _WIDTH, dtype=torch.int64, device=device)
    dist.recv(described, group=group, group_src=source)
    tensors = empty(described, device=device)
    for tensor in tensors:
        dist.recv(tensor, group=group, group_src=source)
    return tensors


def broadcast(
    tensors: Mapping[str, Tensor] | None,
    names: Sequence[str],
    *,
    source: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> dict[str, Tensor]:
    """Named tensors of one rank, on all ranks of the group; ``tensors`` is looked at on the source only."""
    described = torch.zeros(len(names), _WIDTH, dtype=torch.int64, device=device)
    if tensors is not None:
        described = header([tensors[name] for name in names]).to(device)
    dist.broadcast(described, group=group, group_src=source)
    if tensors is None:
        values = empty(described, device=device)
    else:
        values = [tensors[name].detach().contiguous() for name in names]
    for tensor in values:
        dist.broadcast(tensor, group=group, group_src=source)
    return dict(zip(names, values, strict=True))
