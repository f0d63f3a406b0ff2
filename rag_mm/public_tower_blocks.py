"""Towers from public models layer by layer, by the adapters that cut such models anywhere else.

Known are the BERT family, open_clip's transformers and timm's EfficientNets. What an adapter refuses (a subclass,
another pooling) runs as one block: the same numbers, only not cut. Everything else that a tower does (pixels, pooling,
length) is a block at its end or beginning.
"""

from __future__ import annotations

from dataclasses import replace

from timm.models.efficientnet import EfficientNet
from torch import Tensor, nn

from pipeline import Block, BlockProgram
from pipeline.adapters.clip import clip_program
from pipeline.adapters.encoders import BERT_FAMILY, bert_program
from retriever.towers.clip import ClipImageTower, ClipTextTower
from retriever.towers.interface import Tower
from retriever.towers.timm_image import TimmTower
from retriever.towers.transformers_text import PretrainedText

Blocks = tuple[list[Block], dict[str, str | None]]


def blocks_of(tower: Tower) -> Blocks | None:
    """The blocks of a tower and the axes of names that are not per row; None if it cannot be taken apart."""
    try:
        if isinstance(tower, PretrainedText) and isinstance(tower.model, BERT_FAMILY):
            return _bert(tower)
        if isinstance(tower, ClipTextTower):
            return _listed(clip_program(tower.shell[0], tower="text", normalize=True), {"text_features": "text_part"})
        if isinstance(tower, ClipImageTower):
            program = clip_program(tower.shell[0], tower="image", normalize=True)
            return _after_pixels(tower.pixels, _listed(program, {"image_features": "image_part"}))
    except ValueError:
        return None
    if isinstance(tower, TimmTower) and type(tower.model) is EfficientNet:
        return _efficientnet(tower, tower.model)
    return None


def _listed(program: BlockProgram, names: dict[str, str], *, prefix: str = "") -> Blocks:
    """A program's blocks, some tensors named anew, and the names of blocks with a prefix."""
    blocks = [
        replace(
            block,
            name=prefix + block.name,
            reads=tuple(names.get(name, name) for name in block.reads),
            writes=tuple(names.get(name, name) for name in block.writes),
        )
        for block in program.blocks
    ]
    return blocks, {names.get(name, name): axis for name, axis in program.axes.items()}


def _bert(tower: PretrainedText) -> Blocks:
    names = {"mask": "token_mask", "hidden": "token_hidden", "last_hidden_state": "token_hidden"}
    blocks, axes = _listed(bert_program(tower.model), names, prefix="text.")
    return [*blocks, Block("text.pool", tower.pool, ("token_hidden", "attention_mask"), ("text_part",))], axes


def _after_pixels(pixels: nn.Module, listed: Blocks) -> Blocks:
    blocks, axes = listed
    reads = [tuple("pixels" if name == "image" else name for name in block.reads) for block in blocks]
    first = Block("image.pixels", pixels, ("image",), ("pixels",))
    return [first, *(replace(block, reads=read) for block, read in zip(blocks, reads, strict=True))], axes


class _Chain(nn.Module):
    """Modules of a model one after the other."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class _Head(nn.Module):
    """The end of an EfficientNet, and the tower's map."""

    def __init__(self, model: EfficientNet, out: nn.Module) -> None:
        super().__init__()
        self.conv_head, self.bn2, self.global_pool, self.out = model.conv_head, model.bn2, model.global_pool, out

    def forward(self, grid: Tensor) -> Tensor:
        return self.out(self.global_pool(self.bn2(self.conv_head(grid))))


def _efficientnet(tower: TimmTower, model: EfficientNet) -> Blocks:
    layers = [layer for stage in model.blocks for layer in stage]
    return [
        Block("image.stem", _Chain(tower.pixels, model.conv_stem, model.bn1), ("image",), ("feature_map",)),
        *(Block(f"image.layers.{i}", layer, ("feature_map",), ("feature_map",)) for i, layer in enumerate(layers)),
        Block("image.head", _Head(model, tower.out), ("feature_map",), ("image_part",)),
    ], {}
