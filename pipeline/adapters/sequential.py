"""Any ``nn.Sequential`` as a program: one block a child."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from pipeline.adapters.assembly import Loss, assemble, refuse_subclass
from pipeline.program import Block, BlockProgram


def sequential(
    model: nn.Sequential,
    *,
    input: str = "x",
    output: str = "y",
    flatten: bool = False,
    with_loss: Loss | None = None,
    sample_id: bool = False,
) -> BlockProgram:
    """List the children of a ``nn.Sequential`` as blocks ``layer.<path of the child>``.

    Args:
        model: each child takes one tensor and gives one, with one row a sample.
        input: name of the batch input.
        output: name of the result; between blocks the tensor is called ``hidden``.
        flatten: go into children that are ``nn.Sequential`` themselves; otherwise each is one block.
        with_loss: adds a last block that writes ``losses``.
        sample_id: list ``sample_id`` among the batch inputs, for keyed randomness.

    Raises:
        ValueError: if there are no children, or names clash.
    """
    refuse_subclass(model, nn.Sequential)
    if len({input, output, "hidden"}) < 3:
        raise ValueError(f"input is {input!r} and output {output!r}; they and 'hidden' must be three names")
    children = list(_children(model, "layer", flatten=flatten))
    if not children:
        raise ValueError("the nn.Sequential has no children; a program needs at least one block")
    names = [input, *["hidden"] * (len(children) - 1), output]
    blocks = [
        Block(path, child, (names[i],), (names[i + 1],)) for i, (path, child) in enumerate(children)
    ]  # fmt: skip
    return assemble(model, blocks, inputs=(input,), outputs=(output,), with_loss=with_loss, sample_id=sample_id)


def _children(model: nn.Sequential, path: str, *, flatten: bool) -> Iterator[tuple[str, nn.Module]]:
    for name, child in model._modules.items():  # named_children would skip a module that occurs again
        assert child is not None
        if flatten and isinstance(child, nn.Sequential):
            refuse_subclass(child, nn.Sequential)
            yield from _children(child, f"{path}.{name}", flatten=True)
        else:
            yield f"{path}.{name}", child
