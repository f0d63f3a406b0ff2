"""From a list of blocks to a program: what every adapter does at its end.

A loss block is added, blocks that nothing then reads are left out (a pooler, where the loss reads tokens),
and the program is put in the model's own mode (train or eval) because it shares the model's modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from pipeline.keyed_modules import KeyedFunctional
from pipeline.program import SAMPLE_ID, Block, BlockProgram
from pipeline.runtime import LOSSES


@dataclass(frozen=True)
class Loss:
    """A last block: ``module(*reads)`` gives ``losses`` (B, num_objectives).

    Attributes:
        module: its values are divided by denominators of the global batch already (docs/pipeline.md).
        reads: outputs of the adapter's program and batch inputs, in the order of the module's arguments.
    """

    module: nn.Module
    reads: tuple[str, ...]


def table(name: str, module: nn.Module, *, reads: tuple[str, ...], writes: tuple[str, ...]) -> Block:
    """A block that makes masks, position tables or biases from batch inputs alone.

    A plan may send its result over a cut or compute it again on every stage.
    """
    return Block(name, module, reads, writes, recomputable=True)


def assemble(
    model: nn.Module,
    blocks: Sequence[Block],
    *,
    inputs: Sequence[str],
    outputs: Sequence[str],
    axes: Mapping[str, str | None] | None = None,
    with_loss: Loss | None,
    sample_id: bool,
) -> BlockProgram:
    """Build the program.

    Args:
        model: whose mode (train or eval) the program takes.
        blocks: in order, without the loss.
        inputs: batch inputs of these blocks.
        outputs: the model's own outputs; with a loss, ``losses`` is the only output.
        axes: of all names that are not per sample.
        with_loss: added as block ``loss``; what it reads and no block writes is a batch input (one row a sample).
        sample_id: list ``sample_id`` among the inputs, for keyed randomness.

    Raises:
        ValueError: where the loss reads none of the outputs.
    """
    chosen = list(blocks)
    if with_loss is not None:
        if not set(with_loss.reads) & set(outputs):
            raise ValueError(
                f"with_loss reads {', '.join(with_loss.reads)}, none of the model's outputs; "
                f"it must read one of: {', '.join(outputs)}"
            )
        chosen.append(Block("loss", with_loss.module, with_loss.reads, (LOSSES,)))
        outputs = (LOSSES,)
    chosen = _needed(chosen, outputs)
    written = {name for block in chosen for name in block.writes}
    read = dict.fromkeys(name for block in chosen for name in block.reads)
    own = [name for name in inputs if name in read]
    extra = [name for name in read if name not in written and name not in own and name != SAMPLE_ID]
    first = [SAMPLE_ID] if sample_id or SAMPLE_ID in read else []
    known = {*own, *extra, *written}
    program = BlockProgram(
        chosen,
        inputs=[*first, *own, *extra],
        outputs=outputs,
        axes={name: axis for name, axis in (axes or {}).items() if name in known},
    )
    # The loss and the wrappers are new modules in training mode; the model's mode is the program's.
    return program.train(model.training)


def _needed(blocks: Sequence[Block], outputs: Sequence[str]) -> list[Block]:
    live, kept = set(outputs), []
    for block in reversed(blocks):
        if live & set(block.writes):
            live = (live - set(block.writes)) | set(block.reads)
            kept.append(block)
    return kept[::-1]


def refuse_subclass(model: Any, base: type) -> None:
    """Refuse a model whose class computes something else than the class that the adapter knows.

    Raises:
        ValueError: where ``forward`` is overridden.
    """
    # Keyed dropout gives a module a subclass that calls the same forward.
    kind: Any = next(kind for kind in type(model).__mro__ if not issubclass(kind, KeyedFunctional))
    if kind.forward is not base.forward:  # type: ignore[attr-defined]
        raise ValueError(
            f"{type(model).__name__} overrides forward of {base.__name__}, so listing the blocks of "
            f"{base.__name__} would compute another function; write its program by hand (docs/pipeline.md)"
        )
