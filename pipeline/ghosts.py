"""Meta tensors in place of parameters and buffers, which need no memory and keep shapes and ties; and the way back."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn


def make_ghosts(modules: Iterable[nn.Module], *, keep: Collection[Tensor] = ()) -> None:
    """Replace the parameters and buffers of modules (and of those inside) by meta tensors.

    One stands for each tensor, so that ties stay ties (`Module.to` would part them).

    Args:
        keep: tensors that stay as they are.
    """
    kept = {id(tensor) for tensor in keep}
    ghosts: dict[int, tuple[Tensor, Tensor]] = {}
    for module in (part for whole in modules for part in whole.modules()):
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is None or tensor.is_meta or id(tensor) in kept:
                    continue
                if id(tensor) not in ghosts:
                    ghost = tensor.detach().to("meta")
                    if isinstance(tensor, nn.Parameter):
                        ghost = nn.Parameter(ghost, requires_grad=tensor.requires_grad)
                    ghosts[id(tensor)] = ghost, tensor  # the original too: its id must not be given away
                store[name] = ghosts[id(tensor)][0]  # type: ignore[assignment]


def give_memory(modules: Iterable[nn.Module], tensors: Collection[Tensor], *, device: str = "cpu") -> None:
    """Replace meta tensors by ones with memory, whose values are yet to be set: a stage without the rest of a model.

    One replaces each tensor in all the modules (and those inside), so that ties stay ties.

    Args:
        tensors: parameters and buffers of the modules; those that are no meta tensors stay as they are.
    """
    wanted = {id(tensor): tensor for tensor in tensors if tensor.is_meta}
    made: dict[int, Tensor] = {}
    for module in (part for whole in modules for part in whole.modules()):
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is None or id(tensor) not in wanted:
                    continue
                if id(tensor) not in made:
                    new = torch.empty_like(tensor, device=device)
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = new
                store[name] = made[id(tensor)]  # type: ignore[assignment]
