"""Make a model's dropout keyed: masks that depend on (seed, step, block, call, sample), not on the cut.

`make_keyed` replaces dropout modules, and wraps modules that call functional dropout or attention dropout
themselves (``nn.MultiheadAttention``, the attention modules of transformers, your own). Parameters, their
names and ``state_dict`` stay as they are. A wrapped module gets a subclass of its class, as FSDP does it, so
``isinstance`` still holds; deep copies work, pickling whole modules does not.

Gradient checkpointing of transformers, if it is on, becomes `keyed.checkpoint`; enable it before `make_keyed`.

What draws random numbers in some way that this cannot see keeps doing so: the lineage trace finds it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from pipeline.keyed import KeyedDropout, checkpoint
from pipeline.keyed_functional import REPLACED, keyed_functional
from pipeline.replacement import rebind_blocks

Report = Callable[[str, str], None]

_SHARED_DIMS: dict[type[nn.Module], int] = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}
# By name, because their packages need not be installed; the value names the attribute with the probability.
_REFUSED = {
    "AlphaDropout": "p",
    "FeatureAlphaDropout": "p",
    "RReLU": "upper",
    "LSTM": "dropout",
    "GRU": "dropout",
    "RNN": "dropout",
    "StochasticDepth": "p",
    "DropPath": "drop_prob",
    "PatchDropout": "prob",
}
_CHECKPOINT = "_gradient_checkpointing_func"  # set by gradient_checkpointing_enable() of transformers
_ATTENTION_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # how modules of transformers look up their attention
_SUPPORTED_ATTENTION = (None, "eager", "sdpa")


class KeyedFunctional:
    """Mixed into a module's class: its forward runs with functional dropout keyed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward  # type: ignore[misc]
        if not self.training:  # type: ignore[attr-defined]
            return forward(*args, **kwargs)
        with keyed_functional():
            return forward(*args, **kwargs)


class _KeyedChannelDropout(KeyedDropout):
    """Dropout1d/2d/3d: whole channels of (rows, channels, ...)."""

    def forward(self, x: Any) -> Any:
        if x.dim() != self.shared_dims + 2:
            raise RuntimeError(
                f"keyed dropout of channels got {x.dim()} dimensions; it needs {self.shared_dims + 2} (rows, channels, "
                "...), because without rows it cannot tell whose channels they are"
            )
        return super().forward(x)


def make_keyed(module: nn.Module, *, report: Report | None = None) -> nn.Module:
    """Replace generator-state dropout in a module tree by keyed dropout, in place.

    Args:
        module: any module, a block program too; nothing is changed if it is refused.
        report: called with (path, what was done) for every replacement; ``print`` will do.

    Returns:
        The module; another one only if ``module`` is itself a dropout module.

    Raises:
        ValueError: naming the path, for random modules that have no exact keyed form here, with what to do.
    """
    for path, part in module.named_modules(remove_duplicate=False):
        reason = _refusal(part)
        if reason:
            raise ValueError(f"{path or 'the module'} ({type(part).__name__}) cannot be keyed: {reason}")
    tell: Report = report or (lambda path, what: None)
    dropouts = _dropouts(module)
    keyed = {id(old): _keyed_dropout(old) for _, _, _, old in dropouts}
    for parent, name, path, old in dropouts:
        setattr(parent, name, keyed[id(old)])
        tell(path, f"{type(old).__name__} -> {keyed[id(old)]}")
    if id(module) not in keyed and type(module) in _SHARED_DIMS:
        keyed[id(module)] = _keyed_dropout(module)
        tell("", f"{type(module).__name__} -> {keyed[id(module)]}")
    for path, part in module.named_modules():
        if not isinstance(part, KeyedFunctional) and _draws_itself(part):
            tell(path, f"functional dropout in {type(part).__name__} is keyed")
            part.__class__ = _keyed_class(type(part))
    for path, part in module.named_modules():
        if _CHECKPOINT in vars(part):  # transformers: gradient checkpointing was enabled
            setattr(part, _CHECKPOINT, checkpoint)
            tell(path, f"gradient checkpointing in {type(part).__name__} repeats keyed draws")
    rebind_blocks(module)
    return keyed.get(id(module), module)


def _dropouts(module: nn.Module) -> list[tuple[nn.Module, str, str, nn.Module]]:
    """(parent, name in the parent, path, dropout module), under every name it has."""
    return [
        (parent, name, f"{path}.{name}" if path else name, child)
        for path, parent in module.named_modules()
        for name, child in list(parent._modules.items())
        if child is not None and type(child) in _SHARED_DIMS
    ]


def _keyed_dropout(old: nn.Module) -> KeyedDropout:
    shared_dims = _SHARED_DIMS[type(old)]
    kind = _KeyedChannelDropout if shared_dims else KeyedDropout
    new = kind(old.p, shared_dims=shared_dims, inplace=old.inplace)  # type: ignore[arg-type]
    return new.train(old.training)


def _refusal(part: nn.Module) -> str:
    """Why a module cannot be keyed, or an empty string."""
    name = type(part).__name__
    if type(part) in _SHARED_DIMS and not part.p < 1.0:  # type: ignore[operator]
        return f"its probability p is {part.p}; keyed dropout takes [0, 1)"
    if name in _REFUSED and bool(getattr(part, _REFUSED[name], None)):
        return (
            f"it draws from generator state ({_REFUSED[name]} is {getattr(part, _REFUSED[name])}) in a way that has no "
            "keyed form here; set that to 0, or replace the module by one with ordinary dropout"
        )
    if isinstance(part, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) and not part.self_attn.batch_first:
        return "its rows are positions, not samples; build it with batch_first=True"
    if isinstance(part, nn.MultiheadAttention) and part.dropout and (part.bias_k is not None or part.add_zero_attn):
        return "bias_k, bias_v and add_zero_attn are not supported together with attention dropout; set dropout to 0"
    config = getattr(part, "config", None)
    layerdrop = [key for key in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop") if getattr(config, key, 0)]
    if layerdrop:
        return f"its configuration skips whole layers at random ({layerdrop[0]}); set that to 0"
    attention = getattr(config, "_attn_implementation", None)
    if _looks_up_attention(part) and attention not in _SUPPORTED_ATTENTION and _has_dropout(config):
        return (
            f"attention implementation {attention!r} draws inside its kernel; "
            "use attn_implementation='sdpa' or 'eager', or set attention dropout to 0"
        )
    return ""


def _has_dropout(config: Any) -> bool:
    values = vars(config).items()
    return any("drop" in key and isinstance(value, float) and value > 0 for key, value in values)


def _draws_itself(part: nn.Module) -> bool:
    """Whether its own forward (or a method) calls functional dropout or attention."""
    if isinstance(part, nn.MultiheadAttention):
        return part.dropout > 0
    return _looks_up_attention(part) or any(_calls_replaced(function) for function in _functions(type(part)))


def _looks_up_attention(part: nn.Module) -> bool:
    return any(_ATTENTION_INTERFACE in function.__code__.co_names for function in _functions(type(part)))


def _functions(kind: type) -> Iterator[Any]:
    """Functions that a class and its bases outside of torch define."""
    for base in kind.__mro__:
        if base is object or base is KeyedFunctional or base.__module__.partition(".")[0] == "torch":
            continue
        for value in vars(base).values():
            function = inspect.unwrap(value) if callable(value) else None
            if inspect.isfunction(function):
                yield function


def _calls_replaced(function: Any) -> bool:
    names = set(function.__code__.co_names)
    targets = {target.__name__ for target in REPLACED}
    through_module = names & {"functional", "F"} and names & targets
    by_name = any(function.__globals__.get(name) in REPLACED for name in names & targets)
    return bool(through_module or by_name or "scaled_dot_product_attention" in names)


_classes: dict[type, type] = {}


def _keyed_class(kind: type) -> type:
    if kind not in _classes:
        _classes[kind] = type(f"Keyed{kind.__name__}", (KeyedFunctional, kind), {"__module__": kind.__module__})
    return _classes[kind]
