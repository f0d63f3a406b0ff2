"""A side of the dual encoder as a block program, so that it can be cut into stages.

A kind of tower whose layers are known here is a block for every layer; any other is one block, which runs piped as
well but lies on one rank as a whole. Blocks hold the side's own parameters. Names of blocks appear in plans only:
checkpoints use the encoder's. Both sides of an encoder have the same blocks, so one plan is for both.

Shapes: N rows, L trigrams, E width.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from pipeline import Block, BlockProgram, Plan
from retriever.encoder import DualEncoder, EncoderSide, TextTower
from retriever.towers.interface import Tower
from retriever.towers.small_convolutions import ImageTower

EMBEDDING = "embedding"


@dataclass(frozen=True)
class TowerBlocks:
    """A tower's layers.

    Attributes:
        blocks: the last one writes the tower's vectors.
        axes: of the names that are not per row.
    """

    blocks: list[Block]
    axes: dict[str, str | None] = field(default_factory=dict)

    @property
    def output(self) -> str:
        return self.blocks[-1].writes[0]


class _Gates(nn.Module):
    """The trigrams' weights: the beginning of ``TextTower.forward``."""

    def __init__(self, text: TextTower) -> None:
        super().__init__()
        self.gate = text.gate

    def forward(self, ids_NL: Tensor, mask_NL: Tensor) -> Tensor:
        return TextTower.gates(ids_NL, mask_NL, self.gate)


class _Bag(nn.Module):
    """The weighted sum of the trigrams' vectors: the end of ``TextTower.forward``."""

    def __init__(self, text: TextTower) -> None:
        super().__init__()
        self.vector = text.vector

    def forward(self, ids_NL: Tensor, gate_NL: Tensor) -> Tensor:
        return TextTower.bag(ids_NL, gate_NL, self.vector)


class _Join(nn.Module):
    """The parts made one embedding: the end of ``EncoderSide.forward``."""

    def __init__(self, side: EncoderSide) -> None:
        super().__init__()
        self.fusion, self.log_weight = side.fusion, side.log_weight

    def forward(self, *parts_and_has: Tensor) -> Tensor:
        half = len(parts_and_has) // 2
        parts = list(zip(parts_and_has[:half], parts_and_has[half:], strict=True))
        return self.fusion(parts, (0.5 * self.log_weight).exp())


def _trigram_blocks(text: TextTower) -> TowerBlocks:
    return TowerBlocks(
        [
            Block("text.gate", _Gates(text), ("trigram", "trigram_mask"), ("gate",)),
            Block("text.bag", _Bag(text), ("trigram", "gate"), ("text_part",)),
        ]
    )


def _small_image_blocks(image: ImageTower) -> TowerBlocks:
    return TowerBlocks(
        [
            Block("image.patch", image.patch, ("image",), ("grid",)),
            Block("image.mix", image.mix, ("grid",), ("grid",)),
            Block("image.out", image.out, ("grid",), ("image_part",)),
        ]
    )


def _blocks_of(tower: Tower, name: str) -> TowerBlocks:
    """A block for every layer where its kind is known, else one."""
    kind = type(tower).__name__
    if isinstance(tower, TextTower):
        return _trigram_blocks(tower)
    if isinstance(tower, ImageTower):
        return _small_image_blocks(tower)
    if kind in ("PretrainedText", "ClipTextTower", "ClipImageTower", "TimmTower"):
        from rag_mm import public_tower_blocks  # imports the library of the model, which is imported already then

        found = public_tower_blocks.blocks_of(tower)
        if found is not None:
            return TowerBlocks(*found)
    return TowerBlocks([Block(f"{name}.tower", tower, tower.inputs, (f"{name}_part",))])


def tower_program(side: EncoderSide) -> BlockProgram:
    """Features in, ``embedding`` (N, E) out."""
    found: dict[str, TowerBlocks] = {}
    inputs: list[str] = []
    for name, tower in (("text", side.text), ("image", side.image)):
        if tower is None:
            continue
        found[name] = _blocks_of(tower, name)
        inputs += tower.inputs
    has = [f"has_{name}" for name in found]
    reads = (*(one.output for one in found.values()), *has)
    return BlockProgram(
        [*(block for one in found.values() for block in one.blocks), Block("join", _Join(side), reads, (EMBEDDING,))],
        inputs=(*inputs, *has),
        outputs=(EMBEDDING,),
        axes={name: axis for one in found.values() for name, axis in one.axes.items()},
    )


def buffers_here(program: BlockProgram, plan: Plan, rank: int) -> list[Tensor]:
    """Buffers of the blocks of a rank's stages (tables of positions, say)."""
    names = [name for stage in plan.stages_of(rank) for name in plan.stages[stage].blocks]
    return [buffer for name in names for buffer in program.blocks[program.index(name)].module.buffers()]


def saved_buffers(encoder: DualEncoder, buffers: list[Tensor]) -> dict[str, Tensor]:
    """Those of these buffers that checkpoints have, by the encoder's names."""
    saved, wanted = encoder.state_dict(), {id(buffer) for buffer in buffers}
    return {name: buffer for name, buffer in encoder.named_buffers() if name in saved and id(buffer) in wanted}
