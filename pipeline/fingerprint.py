"""Objects described by what decides how they behave: equal texts, equal behaviour, in another process too.

Code is described by the whole file it is written in, and by the files of the project whose functions, classes and
modules that file uses (and so on). Files of installed packages are read but not followed. An object whose behaviour
cannot be told from its type is refused, not guessed.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, CodeType, MethodDescriptorType, MethodType, ModuleType, WrapperDescriptorType
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (
    bool, int, float, complex, str, bytes, range, slice, Path, re.Pattern, torch.dtype, torch.device, torch.layout,
    torch.memory_format, type(None), type(Ellipsis),
)  # fmt: skip
_BUILTIN = BuiltinFunctionType | MethodDescriptorType | WrapperDescriptorType
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


class UnknownObject(Exception):
    """An object that cannot be described; the message names it."""


def describe_tensor(tensor: Tensor) -> str:
    """Shape, type, kind of device and whether it trains; not its values."""
    return f"{tuple(tensor.shape)} {tensor.dtype} {tensor.device.type} {tensor.requires_grad}"


def describe_module(module: nn.Module) -> str:
    """A module tree: classes, modes and attributes of its parts, and its tensors.

    Raises:
        UnknownObject: naming the path and the attribute.
    """
    return _Describer().module(module)


class _Describer:
    """Remembers what it is in, because objects refer to each other in circles."""

    def __init__(self) -> None:
        self.open: list[Any] = []

    def module(self, module: nn.Module) -> str:
        parts = []
        for path, part in module.named_modules(remove_duplicate=False):
            parts.append(f"{path} {self.kind(type(part))} {part.training}")
            for name, value in sorted(vars(part).items()):
                if name in ("training", "_parameters", "_buffers", "_modules"):
                    continue
                try:
                    parts.append(f"{name} {self.value(value)}")
                except UnknownObject as error:
                    raise UnknownObject(f"{path or type(part).__name__}.{name}: {error}") from None
        parts += [f"{name} {describe_tensor(p)}" for name, p in module.named_parameters(remove_duplicate=False)]
        parts += [f"{name} {describe_tensor(b)}" for name, b in module.named_buffers(remove_duplicate=False)]
        return "\n".join(parts)

    def value(self, value: Any) -> str:
        if isinstance(value, _PLAIN) and not isinstance(value, Enum):
            return repr(value)
        if isinstance(value, Tensor):
            return describe_tensor(value)
        if any(value is other for other in self.open):
            return f"again {type(value).__qualname__}"
        self.open.append(value)
        try:
            return f"{type(value).__qualname__} {self._compound(value)}"
        finally:
            self.open.pop()

    def _compound(self, value: Any) -> str:
        if isinstance(value, Enum):
            return f"{self.kind(type(value))} {value.name}"
        if isinstance(value, list | tuple):
            return repr([self.value(item) for item in value])
        if isinstance(value, set | frozenset):
            return repr(sorted(self.value(item) for item in value))
        if isinstance(value, Mapping):
            return repr([(self.value(key), self.value(item)) for key, item in value.items()])
        if isinstance(value, functools.partial):
            return repr([self.value(part) for part in (value.func, value.args, value.keywords)])
        if isinstance(value, MethodType):
            return f"{self.value(value.__func__)} {self.value(value.__self__)}"
        if isinstance(value, _BUILTIN):
            owner = getattr(value, "__self__", None)
            of = "" if owner is None or isinstance(owner, type | ModuleType) else self.value(owner)
            return f"{value.__module__} {value.__qualname__} {of}"
        if inspect.isfunction(value):
            return self._function(value)
        if isinstance(value, type):
            return self.kind(value)
        if isinstance(value, ModuleType):
            return _code_of(value.__name__)
        if isinstance(value, nn.Module):
            return self.module(value)
        if hasattr(value, "to_dict"):  # configurations of transformers, which leave this field out
            attention = getattr(value, "_attn_implementation", None)
            return f"{self.kind(type(value))} {self.value(value.to_dict())} {self.value(attention)}"
        if is_dataclass(value):
            held = [(field.name, self.value(getattr(value, field.name))) for field in fields(value)]
            return f"{self.kind(type(value))} {held}"
        raise UnknownObject(f"what a {type(value).__module__}.{type(value).__qualname__} does is not known")

    def _function(self, function: Any) -> str:
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(self.value(cell.cell_contents))
            except ValueError:  # an empty cell
                cells.append("empty")
        defaults = self.value((function.__defaults__, function.__kwdefaults__))
        code = f"{_code_of(function.__module__)} {self._code(function.__code__)}"
        return f"{function.__qualname__} {code} {defaults} {cells}"

    def _code(self, code: CodeType) -> str:
        constants = [self._code(c) if inspect.iscode(c) else self.value(c) for c in code.co_consts]
        return f"{code.co_code.hex()} {code.co_names} {constants}"

    def kind(self, kind: type) -> str:
        """A class and its bases. One made at run time by its functions too: they may close over things."""
        names = []
        for base in kind.__mro__:
            names.append(f"{base.__module__}.{base.__qualname__}")
            if base.__module__.partition(".")[0] in ("torch", "builtins"):  # torch's version is in the key
                continue
            names.append(_code_of(base.__module__))
            if not _is_written(base) and not any(base is other for other in self.open):
                self.open.append(base)
                held = sorted((name, value) for name, value in vars(base).items() if inspect.isfunction(value))
                names.append(repr([(name, self.value(value)) for name, value in held]))
                self.open.pop()
        return " ".join(names)


def _is_written(kind: type) -> bool:
    """Whether the class is found under its name in its module."""
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kind


@functools.cache
def _code_of(name: str) -> str:
    """Digest of a module's file and of the project's files that it uses."""
    waiting, found = [name], {}
    while waiting:
        current = waiting.pop()
        if current in found:
            continue
        module = sys.modules.get(current)
        file = getattr(module, "__file__", None)
        if file is None or not Path(file).is_file():
            if current == name and name not in sys.builtin_module_names:
                raise UnknownObject(f"the code of module {name!r} is in no file")
            found[current] = ""
            continue
        found[current] = hashlib.blake2b(Path(file).read_bytes(), digest_size=16).hexdigest()
        if not file.startswith(_INSTALLED):
            for value in list(vars(module).values()):
                if isinstance(value, ModuleType):
                    waiting.append(value.__name__)
                elif inspect.isfunction(value) or isinstance(value, type):
                    waiting.append(value.__module__)
    return hashlib.blake2b(repr(sorted(found.items())).encode(), digest_size=16).hexdigest()
