"""Weights under the names of the model that a program was made of.

A program names a parameter ``block.param`` by the first block that holds it; files of public weights name
it by its path in the original model. Both hold the same tensor objects, so the names are matched by
identity, ties included, and a state is renamed without touching a value.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pipeline.program import BlockProgram, nearest

Names = dict[str, tuple[str, ...]]


def original_names(program: BlockProgram, model: nn.Module, *, strict: bool = True) -> Names:
    """The model's ``state_dict`` names of each parameter and stored buffer of a program.

    Args:
        strict: refuse a parameter that the model does not hold, as a projection or a loss of its own may; otherwise it
            is left out.

    Returns:
        Global name -> the model's names, the first as in the model's own files, the others ties
        (a head and its embedding).

    Raises:
        ValueError: if the program holds a parameter that the model does not.
    """
    theirs: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        theirs.setdefault(id(tensor), []).append(name)
    names: Names = {}
    stored = {id(tensor) for tensor in program.state_dict(keep_vars=True).values()}
    for name, tensor in {**program.named_parameters_global(), **program.named_buffers_global()}.items():
        if id(tensor) in theirs:
            names[name] = tuple(theirs[id(tensor)])
        elif strict and (isinstance(tensor, nn.Parameter) or id(tensor) in stored):
            raise ValueError(
                f"the program's {name!r} is no tensor of this {type(model).__name__}; give the model that the program "
                "was made of, before freeing other stages (or strict=False, to leave out what is not the model's)"
            )
    return names


def to_original(state: Mapping[str, Tensor], names: Names, *, ties: bool = False) -> dict[str, Tensor]:
    """Rename a state by global names, or a part of it, to the model's names.

    Args:
        state: such as the parameters of one stage.
        names: from `original_names`.
        ties: list a tied tensor under all its names (for ``model.load_state_dict``) instead of the first
            only (for a file: safetensors refuses one tensor under two names).

    Raises:
        ValueError: for a name that is unknown.
    """
    result = {}
    for name, tensor in state.items():
        if name not in names:
            raise ValueError(f"unknown global name {name!r}{nearest(name, names)}")
        for original in names[name] if ties else names[name][:1]:
            result[original] = tensor
    return result


def from_original(state: Mapping[str, Tensor], names: Names, *, strict: bool = True) -> dict[str, Tensor]:
    """Rename a state by the model's names, such as a file of public weights, to global names.

    Args:
        state: a tied tensor may be under any of its names, or under several with equal values.
        names: from `original_names`.
        strict: refuse names that no block holds (the program may leave a pooler out, a file may hold buffers).

    Raises:
        ValueError: for a tensor that is missing, unexpected, or a tie whose values differ.
    """
    result, used = {}, set()
    for name, originals in names.items():
        found = [original for original in originals if original in state]
        if not found:
            raise ValueError(f"{originals[0]!r} is missing{nearest(originals[0], state)}")
        for other in found[1:]:
            if not torch.equal(state[other], state[found[0]]):
                raise ValueError(f"{found[0]!r} and {other!r} are one tied tensor, but their values differ")
        result[name] = state[found[0]]
        used.update(found)
    if strict and (extra := sorted(set(state) - used)):
        raise ValueError(f"{extra[0]!r} and {len(extra) - 1} more belong to no block; give strict=False to leave them")
    return result


def load_original(program: BlockProgram, state: Mapping[str, Tensor], names: Names, *, strict: bool = True) -> None:
    """Copy a state by the model's names into a program (and so into the model that shares its tensors).

    Raises:
        ValueError: as `from_original`, and for another shape; nothing is copied then.
    """
    own: dict[str, Tensor] = {**program.named_parameters_global(), **program.named_buffers_global()}
    given = from_original(state, names, strict=strict)
    for name, tensor in given.items():
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"{names[name][0]!r} has shape {tuple(tensor.shape)}; the program's has {tuple(own[name].shape)}"
            )
    with torch.no_grad():
        for name, tensor in given.items():
            own[name].copy_(tensor)
