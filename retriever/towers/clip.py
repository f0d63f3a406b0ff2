"""Either half of an ``open_clip`` model: by name or from a JSON file, with a local checkpoint or random weights.

Names of weights are open_clip's for towers apart (``text.*``, ``visual.*``), so its checkpoints load, which are read as
plain tensors. Vectors have length 1, as that library compares them. A transformer sees pictures of one size: its
positions are made for ``retriever.image_side`` (or ``data.image_size``), and interpolated if the checkpoint has others.
``MODEL:TAG`` takes mean and deviation (not weights) of that pretrained model; ``data.image_transform`` does the rest.

Shapes: N rows, L text positions, S side of a picture.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import open_clip
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.json_files import read_json
from retriever.config import RetrieverConfig
from retriever.towers.interface import ImageBackend, TextBackend, Tower
from retriever.towers.pixels import Pixels
from retriever.towers.rowwise import rowwise


class ClipTextTower(Tower):
    """The text half.

    Attributes:
        shell: the model whose half this is, kept out of the module tree.
    """

    inputs = ("text",)

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.shell, self.model, self.dim = (model,), model.text, int(model.text.output_dim)

    def forward(self, text_NL: Tensor) -> Tensor:
        return F.normalize(self.model(text_NL), dim=-1)


class ClipImageTower(Tower):
    """The picture half; see `ClipTextTower`."""

    inputs = ("image",)

    def __init__(self, model: Any, pixels: Pixels) -> None:
        super().__init__()
        self.shell, self.pixels, self.model, self.dim = (model,), pixels, model.visual, int(model.visual.output_dim)

    def forward(self, image_N3SS: Tensor) -> Tensor:
        return F.normalize(self.model(self.pixels(image_N3SS)), dim=-1)


class ClipText(TextBackend):
    """``retriever.text: open_clip``."""

    def __init__(self, config: RetrieverConfig) -> None:
        super().__init__(config)
        self.name, self.described = _find(config.text_model, "text_model")
        try:
            self.tokenizer: Any = open_clip.get_tokenizer(self.name)
        except Exception as error:  # whatever a tokenizer that is not in the package raises offline
            raise ValueError(
                f"retriever.text_model is {config.text_model!r}, whose tokenizer is not in open_clip's package: {error}"
            ) from None
        self.length = int(self.tokenizer.context_length)

    def features(self, texts: Sequence[str]) -> dict[str, Tensor]:
        if hasattr(self.tokenizer, "encode"):
            lengths = [len(self.tokenizer.encode(text)) + 2 for text in texts]
        else:  # one of transformers, inside of open_clip's
            lengths = [len(self.tokenizer.tokenizer(text)["input_ids"]) for text in texts]
        self.truncated += sum(length > self.length for length in lengths)
        ids_NL = self.tokenizer(list(texts)) if texts else torch.zeros(0, self.length, dtype=torch.int64)
        return {"text": ids_NL}

    def tower(self, *, weights: bool = True) -> ClipTextTower:
        model = _model(self.name, self.config.text_checkpoint if weights else "", part="text", side=0)
        model.visual = nn.Identity()
        return ClipTextTower(model)

    def describe(self) -> dict[str, Any]:
        return {"kind": "open_clip", **self.described, "tokenizer": _tokenizer_hash(self.tokenizer)}


class ClipImage(ImageBackend):
    """``retriever.image: open_clip``."""

    def __init__(self, config: RetrieverConfig, image_size: int) -> None:
        super().__init__(config, image_size)
        self.name, self.described = _find(config.image_model, "image_model")
        self.side = config.image_side or image_size
        _, _, tag = config.image_model.partition(":")
        if tag and tag not in open_clip.list_pretrained_tags_by_model(self.name):
            known = ", ".join(open_clip.list_pretrained_tags_by_model(self.name)) or "none"
            raise ValueError(
                f"retriever.image_model is {config.image_model!r}; pretrained tags of {self.name}: {known}"
            )
        given = open_clip.get_pretrained_cfg(self.name, tag) if tag else {}
        mean, deviation = given.get("mean"), given.get("std")
        self.pixels = Pixels(
            mean or open_clip.OPENAI_DATASET_MEAN, deviation or open_clip.OPENAI_DATASET_STD, side=self.side
        )

    def tower(self, *, weights: bool = True) -> ClipImageTower:
        model = _model(self.name, self.config.image_checkpoint if weights else "", part="image", side=self.side)
        model.text = nn.Identity()
        return ClipImageTower(model, self.pixels)

    def describe(self) -> dict[str, Any]:
        return {"kind": "open_clip", **self.described, **self.pixels.describe()}


def _find(name: str, field: str) -> tuple[str, dict[str, Any]]:
    """The name under which open_clip knows a model, and what a manifest says of it."""
    path = Path(name)
    if path.suffix == ".json":
        if not path.is_file():
            raise ValueError(f"retriever.{field} is {name!r}, which is not a file")
        read_json(path)
        open_clip.add_model_config(path)
        name = path.stem
    name = name.partition(":")[0]
    config = open_clip.get_model_config(name) if name in open_clip.list_models() else None
    if config is None:
        near = difflib.get_close_matches(name, open_clip.list_models(), n=1)
        hint = f"did you mean {near[0]}?" if near else "open_clip.list_models() lists its names"
        raise ValueError(f"retriever.{field} is {name!r}, which open_clip has no model of; {hint}")
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=8).hexdigest()
    return name, {"model": name, "config": digest}


def _model(name: str, checkpoint: str, *, part: str, side: int) -> Any:
    if checkpoint and not Path(checkpoint).is_file():
        raise ValueError(f"retriever.{part}_checkpoint is {checkpoint!r}, which is not a file")
    try:
        model = open_clip.create_model(
            name, pretrained=checkpoint or None, load_weights=bool(checkpoint), force_custom_text=True,
            force_image_size=side or None, pretrained_text=False, weights_only=True,
        )  # fmt: skip
    except (ValueError, RuntimeError, OSError, KeyError) as error:
        raise ValueError(
            f"retriever.{part}_model is {name!r}, which cannot be made"
            + (f" with retriever.{part}_checkpoint {checkpoint!r}" if checkpoint else "")
            + f": {error}"
        ) from None
    return rowwise(model, what=f"retriever.{part}_model {name}")


def _tokenizer_hash(tokenizer: Any) -> str:
    encoder = getattr(tokenizer, "encoder", None)
    text = repr(sorted(encoder.items())) if encoder else repr(type(tokenizer))
    return hashlib.blake2b(f"{text} {tokenizer.context_length}".encode(), digest_size=8).hexdigest()
