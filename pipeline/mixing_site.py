"""Where samples mix: the innermost submodule, and the operation with its line of source.

Found by running a block twice, plain and disturbed, and looking for the first call whose inputs agree in the
untouched samples while its outputs do not. A tensor counts as agreeing if it does along any axis that may
be the samples' (its length is a multiple of their number), so transposed layouts are no false lead.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


@dataclass(frozen=True)
class _Call:
    what: str
    inputs: list[Tensor]
    outputs: list[Tensor]


def mixing_site(block_name: str, module: nn.Module, run: Callable[[bool], object], untouched: Tensor, n: int) -> str:
    """``block.path (Class), in operation (file, line: source)`` of the first place that mixes.

    Args:
        run: runs the block, disturbed or not.
        untouched: samples whose inputs are the same in both runs.
        n: samples of the batch.
    """
    plain, disturbed = (_module_calls(block_name, module, partial(run, which)) for which in (False, True))
    where = _first(plain, disturbed, untouched, n) or f"{block_name} ({type(module).__name__})"
    operations = []
    for which in (False, True):
        with _Operations() as mode:
            run(which)
        operations.append(mode.calls)
    operation = _first(operations[0], operations[1], untouched, n)
    return f"{where}, in {operation}" if operation else where


def backward_site(block_name: str, module: nn.Module, run: Callable[[bool], object], untouched: Tensor, n: int) -> str:
    """The same for a backward: the first submodule that gets equal gradients and gives different ones.

    The block itself where hooks on its submodules are not possible (work in place on what they return).
    """
    try:
        plain, disturbed = (_backward_calls(block_name, module, partial(run, which)) for which in (False, True))
    except RuntimeError:
        plain, disturbed = [], []
    return _first(plain, disturbed, untouched, n) or f"{block_name} ({type(module).__name__})"


def _backward_calls(block_name: str, module: nn.Module, run: Callable[[], object]) -> list[_Call]:
    calls: list[_Call] = []

    def leave(name: str) -> Callable[..., None]:
        path = f"{block_name}.{name}" if name else block_name
        return lambda part, given, received: calls.append(
            _Call(f"{path} ({type(part).__name__})", _tensors(received), _tensors(given))
        )

    handles = [part.register_full_backward_hook(leave(name)) for name, part in module.named_modules()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _first(plain: list[_Call], disturbed: list[_Call], untouched: Tensor, n: int) -> str:
    for old, new in zip(plain, disturbed, strict=False):
        if old.what != new.what:
            return ""  # another branch was taken; what follows cannot be compared
        same_inputs = _agree(old.inputs, new.inputs, untouched, n)
        if same_inputs and not _agree(old.outputs, new.outputs, untouched, n):
            return old.what
    return ""


def _agree(old: list[Tensor], new: list[Tensor], untouched: Tensor, n: int) -> bool:
    return all(_same(a, b, untouched, n) for a, b in zip(old, new, strict=False))


def _same(a: Tensor, b: Tensor, untouched: Tensor, n: int) -> bool:
    if a.shape != b.shape:
        return False
    equal = (a == b) | ((a != a) & (b != b))
    axes = [axis for axis, size in enumerate(a.shape) if size and size % n == 0]
    for axis in axes:
        k = a.shape[axis] // n
        rows = (untouched[:, None] * k + torch.arange(k)).reshape(-1).to(a.device)
        if bool(equal.index_select(axis, rows).all()):
            return True
    return bool(equal.all())


def _module_calls(block_name: str, module: nn.Module, run: Callable[[], object]) -> list[_Call]:
    calls: list[_Call] = []
    entered: list[list[Tensor]] = []

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        entered.append(_tensors((*args, *kwargs.values())))

    def leave(name: str) -> Callable[..., None]:
        path = f"{block_name}.{name}" if name else block_name
        return lambda part, args, kwargs, result: calls.append(
            _Call(f"{path} ({type(part).__name__})", entered.pop(), _tensors((result,)))
        )

    handles = []
    for name, part in module.named_modules():
        handles.append(part.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(part.register_forward_hook(leave(name), with_kwargs=True))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


class _Operations(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        inputs = _tensors((*args, *(kwargs or {}).values()))
        result = func(*args, **(kwargs or {}))
        outputs = _tensors((result,))
        if outputs:
            name = getattr(func, "__name__", str(func))
            self.calls.append(_Call(f"{name}{_source_line()}", inputs, outputs))
        return result


def _source_line() -> str:
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None or frame.f_code.co_filename.startswith(_HERE):
        return ""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f" ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno}: {line})"


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value.detach().clone())
        elif isinstance(value, tuple | list):
            found += _tensors(value)
    return found
