"""Meta tensors in place of parameters and buffers: what keeps their shapes and ties and needs no memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable

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
