"""Profiles kept by the content they describe, so that an unchanged program is not traced again.

The key covers what decides costs and lineage without running anything: each block's name, reads, writes and
modules (class, source, configuration, hooks), parameter shapes, types and whether they train, training mode,
batch shapes, the options of the trace, the machine and torch, and the code of this package. It does not cover the
values of weights and batch.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.profile import Profile
from pipeline.program import BlockProgram


def trace_key(program: BlockProgram, batch: Mapping[str, Tensor], options: tuple[Any, ...]) -> str:
    """32 hexadecimal digits."""
    parts = [torch.__version__, _own_code(), repr(options), repr(program.inputs), repr(program.outputs)]
    parts += [f"{name} {_tensor(tensor)} {program.axis(name)}" for name, tensor in sorted(batch.items())]
    for block in program.blocks:
        parts.append(f"block {block.name} {block.reads} {block.writes} {block.recomputable}")
        for path, module in block.module.named_modules(remove_duplicate=False):
            parts.append(f"{path} {_class(type(module))} {module.training} {_settings(module)}")
        parts += [f"{name} {_tensor(tensor)}" for name, tensor in block.module.named_parameters()]
        parts += [f"{name} {_tensor(tensor)}" for name, tensor in block.module.named_buffers()]
        parts += sorted(f"{name} {_tensor(p)}" for name, p in program.block_parameters(block.name).items())
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(f"{len(part)} {part}".encode())
    return digest.hexdigest()


def load(path: Path) -> Profile | None:
    """The profile of a cache file, marked as cached; None if there is none.

    Raises:
        ValueError: if the file is no profile.
    """
    if not path.exists():
        return None
    try:
        return replace(Profile.from_json(path.read_text()), cached=True)
    except ValueError as error:
        raise ValueError(f"cached trace {path}: {error}; delete the file") from error


def store(path: Path, profile: Profile) -> None:
    """Write a cache file; it appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(profile.to_json())
    part.replace(path)


def _tensor(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} {tensor.device.type} {tensor.requires_grad}"


@functools.cache
def _own_code() -> str:
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.blake2b(b"".join(path.read_bytes() for path in sources)).hexdigest()


_classes: dict[type, str] = {}


def _class(kind: type) -> str:
    if kind not in _classes:
        _classes[kind] = _describe(kind)
    return _classes[kind]


def _describe(kind: type) -> str:
    names = []
    for base in kind.__mro__:
        if base in (object, nn.Module):
            continue
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):  # written at a prompt, or made at run time: its methods' code stands for it
            source = repr(sorted((name, _value(value)) for name, value in vars(base).items() if callable(value)))
        names.append(f"{base.__module__}.{base.__qualname__} {source}")
    return " ".join(names)


def _settings(module: nn.Module) -> str:
    """Plain attributes of a module, and the functions it was given."""
    skipped = {"training", "_parameters", "_buffers", "_modules"}
    return repr(sorted((name, _value(value)) for name, value in vars(module).items() if name not in skipped))


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, list | tuple | set | frozenset):
        return (
            f"{type(value).__name__}({sorted(map(_value, value)) if isinstance(value, set) else [*map(_value, value)]})"
        )
    if isinstance(value, dict):
        return repr([(_value(k), _value(v)) for k, v in value.items()])
    if inspect.isfunction(value):
        code = value.__code__
        cells = [_value(cell.cell_contents) for cell in value.__closure__ or () if cell.cell_contents is not value]
        constants = [c for c in code.co_consts if not inspect.iscode(c)]
        return f"{value.__qualname__} {code.co_code.hex()} {code.co_names} {constants} {cells}"
    if hasattr(value, "to_dict"):  # configurations of transformers
        return repr(value.to_dict())
    if is_dataclass(value):
        return repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"
