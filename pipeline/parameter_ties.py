"""Parameters that share memory without being the same tensor: views of one storage, slices of another's weight.

Whole ties (one Parameter in several blocks) can live as synchronised copies on several stages. Partial ties
cannot: an update of one tensor changes part of another. They are found here so that a planner can keep
their blocks together.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from pipeline.program import BlockProgram


def partial_ties(program: BlockProgram) -> dict[str, dict[str, int]]:
    """By block: canonical name of the first parameter of a storage -> bytes shared with other blocks.

    Looks at parameters, buffers and tensors that modules hold as plain attributes.
    """
    names = {_storage(p): name for name, p in reversed(program.named_parameters_global().items())}
    held = {block.name: [t for t in _held(block.module) if _storage(t) in names] for block in program.blocks}
    found: dict[str, dict[str, int]] = {block.name: {} for block in program.blocks}
    for name, mine in held.items():
        for tensor in mine:
            overlaps = [
                _overlap(tensor, theirs)
                for other, others in held.items()
                if other != name
                for theirs in others
                if theirs is not tensor
            ]
            if any(overlaps):
                key = names[_storage(tensor)]
                found[name][key] = max(found[name].get(key, 0), *overlaps)
    return found


def _held(module: nn.Module) -> Iterator[Tensor]:
    for part in module.modules():
        for store in (part._parameters, part._buffers, vars(part)):
            yield from (value for value in store.values() if isinstance(value, Tensor))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _overlap(a: Tensor, b: Tensor) -> int:
    """Bytes between the first and last number of both (an upper bound for strided views)."""
    if _storage(a) != _storage(b) or not a.numel() or not b.numel():
        return 0
    (start_a, end_a), (start_b, end_b) = _range(a), _range(b)
    return max(0, min(end_a, end_b) - max(start_a, start_b))


def _range(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.element_size()
    return int(start), int(start + (last + 1) * tensor.element_size())
