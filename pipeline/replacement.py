"""Block programs after modules in their tree were replaced.

A program holds each block's module twice: registered under the block's name, and in the block itself.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from pipeline.program import BlockProgram


def rebind_blocks(module: nn.Module) -> None:
    """Give the blocks of every program in a module tree the modules that are now registered under their names."""
    for part in module.modules():
        if isinstance(part, BlockProgram):
            part.blocks = tuple(replace(block, module=part.get_submodule(block.name)) for block in part.blocks)
