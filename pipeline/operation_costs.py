"""FLOPs, bytes and (for a described device) seconds of the operations that run, without their values.

Bytes are those of an operation's inputs and results; views cost nothing, and a look-up of rows reads the
rows, not the table. Works on any tensors, those of the meta device included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from pipeline.device import Device

_aten = torch.ops.aten
# Attention on a CPU, which torch's own registry leaves out.
_ATTENTION: dict[Any, tuple[int, Callable[..., int]]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: (3, sdpa_flop),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (4, sdpa_backward_flop),
}
_LOOK_UPS = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather}
_FREE = {_aten._unsafe_view, _aten.lift_fresh, _aten.detach, _aten.alias}


class OperationCosts(TorchDispatchMode):
    """Counts while it is entered.

    Attributes:
        flops, bytes_moved, num_operations: sums so far.
        seconds: sum of the operations' times on ``device`` (0 without one).
    """

    def __init__(self, device: Device | None = None) -> None:
        super().__init__()
        self.device = device
        self.flops = self.bytes_moved = self.num_operations = 0
        self.seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func._overloadpacket
        if func.is_view or packet in _FREE:
            return result
        inputs, outputs = list(_tensors((*args, *kwargs.values()))), list(_tensors((result,)))
        num_flops = int(_flops(packet, args, kwargs, result))
        read = inputs[1:] + outputs if packet in _LOOK_UPS else inputs
        num_bytes = sum(_bytes(tensor) for tensor in (*read, *outputs))
        self.num_operations += 1
        self.flops += num_flops
        self.bytes_moved += num_bytes
        if self.device is not None:
            dtype = next((t.dtype for t in inputs if t.is_floating_point()), torch.float32)
            self.seconds += self.device.seconds(flops=num_flops, num_bytes=num_bytes, dtype=dtype)
        return result


def _flops(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    if packet in _ATTENTION:
        shapes = [t.shape for t in args if isinstance(t, Tensor)]
        num_shapes, attention = _ATTENTION[packet]
        return attention(*shapes[:num_shapes])
    formula: Callable[..., int] | None = flop_registry.get(packet)
    return 0 if formula is None else formula(*args, **kwargs, out_val=result)


def _bytes(tensor: Tensor) -> int:
    """Bytes that hold its numbers: an expanded tensor has fewer than its shape says."""
    own = tensor.numel() * tensor.element_size()
    return min(own, tensor.untyped_storage().nbytes()) if own else 0


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
