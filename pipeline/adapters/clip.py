"""Towers of ``open_clip`` models as programs.

B samples, S pixels a side, L text positions, D width, E features. Transformer layers are the model's own
modules (``block.module.layer``); the parameters that open_clip keeps on the tower itself (class token,
positions, projection) are registered in the embedding and pooling blocks as the same objects.
"""

from __future__ import annotations

from typing import Any

import torch
from open_clip.model import CLIP, CustomTextCLIP
from open_clip.transformer import TextTransformer, VisionTransformer, text_global_pool
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.adapters.assembly import Loss, assemble, refuse_subclass, table
from pipeline.program import Block, BlockProgram, nearest

TOWERS = ("image", "text", "both")


class ImageEmbedding(nn.Module):
    """Patches, class token, positions and the norm before the layers."""

    def __init__(self, visual: Any) -> None:
        super().__init__()
        self.conv1, self.patch_dropout, self.ln_pre = visual.conv1, visual.patch_dropout, visual.ln_pre
        self.class_embedding, self.positional_embedding = visual.class_embedding, visual.positional_embedding

    def forward(self, image: Tensor) -> Tensor:
        """(B, 1 + patches, D) from (B, 3, S, S)."""
        patches = self.conv1(image).flatten(2).transpose(1, 2)
        first = self.class_embedding.to(patches.dtype).expand(patches.shape[0], 1, -1)
        hidden = torch.cat([first, patches], 1) + self.positional_embedding.to(patches.dtype)
        return self.ln_pre(self.patch_dropout(hidden))


class ImagePool(nn.Module):
    """Norm, pooling and projection of the image tower."""

    def __init__(self, visual: Any, *, normalize: bool) -> None:
        super().__init__()
        self.ln_post, self.proj = visual.ln_post, visual.proj
        self.pool_type, self.norm_last, self.normalize = visual.pool_type, visual.final_ln_after_pool, normalize

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, E)."""
        hidden = hidden if self.norm_last else self.ln_post(hidden)
        pooled = hidden[:, 0] if self.pool_type == "tok" else hidden[:, 1:].mean(1)
        pooled = self.ln_post(pooled) if self.norm_last else pooled
        pooled = pooled if self.proj is None else pooled @ self.proj
        return F.normalize(pooled, dim=-1) if self.normalize else pooled


class TextEmbedding(nn.Module):
    """Tokens and positions of the text tower."""

    def __init__(self, text: Any) -> None:
        super().__init__()
        self.token_embedding, self.positional_embedding = text.token_embedding, text.positional_embedding

    def forward(self, text_BL: Tensor) -> Tensor:
        """(B, L, D)."""
        return self.token_embedding(text_BL) + self.positional_embedding[: text_BL.shape[1]]


class TextMask(nn.Module):
    """The model's causal mask, cut to the length of the text."""

    def __init__(self, attn_mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("attn_mask", attn_mask, persistent=False)

    def forward(self, text_BL: Tensor) -> Tensor:
        """(L, L), additive."""
        return self.attn_mask[: text_BL.shape[1], : text_BL.shape[1]]  # type: ignore[index]


class TextPool(nn.Module):
    """Norm, pooling at the end token and projection of the text tower."""

    def __init__(self, text: Any, *, pool_type: str, eos_id: int | None, normalize: bool) -> None:
        super().__init__()
        self.ln_final, self.text_projection = text.ln_final, text.text_projection
        self.pool_type, self.eos_id, self.normalize = pool_type, eos_id, normalize

    def forward(self, hidden_BLD: Tensor, text_BL: Tensor) -> Tensor:
        """(B, E)."""
        pooled = text_global_pool(self.ln_final(hidden_BLD), text_BL, self.pool_type, eos_token_id=self.eos_id)
        if isinstance(self.text_projection, nn.Linear):
            pooled = self.text_projection(pooled)
        elif self.text_projection is not None:
            pooled = pooled @ self.text_projection
        return F.normalize(pooled, dim=-1) if self.normalize else pooled


class TowerLayer(nn.Module):
    """A residual attention block of either tower."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_BLD: Tensor, mask_LL: Tensor | None = None) -> Tensor:
        """(B, L, D)."""
        return self.layer(hidden_BLD, attn_mask=mask_LL)


def clip_program(
    model: Any,
    *,
    tower: str,
    normalize: bool = False,
    with_loss: Loss | None = None,
    sample_id: bool = False,
) -> BlockProgram:
    """One tower of an open_clip model, or both, one after the other.

    Batch inputs: ``image`` (B, 3, S, S) in the type of the weights, ``text`` (B, L). Outputs:
    ``image_features`` and ``text_features``, both (B, E), as ``encode_image`` and ``encode_text`` give them.
    Blocks: ``visual.embed``, ``visual.layers.<i>``, ``visual.pool``, and the same for ``text``. A contrastive
    loss mixes samples and belongs outside (docs/pipeline.md).

    Args:
        model: ``open_clip.create_model(...)`` with transformer towers of open_clip itself.
        tower: ``image``, ``text`` or ``both``.
        normalize: features of length 1.
        with_loss: adds a last block that writes ``losses``.
        sample_id: list ``sample_id`` among the batch inputs, for keyed randomness.

    Raises:
        ValueError: for other towers (convolutional, timm, transformers), attentional pooling, tokens as second
            output, class tokens or padding masks in the text tower.
    """
    if tower not in TOWERS:
        raise ValueError(f"tower is {tower!r}; allowed: {', '.join(TOWERS)}{nearest(str(tower), TOWERS)}")
    refuse_subclass(model, next(base for base in (CLIP, CustomTextCLIP) if isinstance(model, base)))
    blocks: list[Block] = []
    outputs: list[str] = []
    if tower != "text":
        blocks += _image_blocks(model.visual, normalize=normalize)
        outputs.append("image_features")
    if tower != "image":
        blocks += _text_blocks(model, normalize=normalize)
        outputs.append("text_features")
    return assemble(
        model,
        blocks,
        inputs=("image", "text"),
        outputs=tuple(outputs),
        axes={"text_mask": None},
        with_loss=with_loss,
        sample_id=sample_id,
    )


def _image_blocks(visual: Any, *, normalize: bool) -> list[Block]:
    if not isinstance(visual, VisionTransformer):
        raise ValueError(
            f"the image tower is a {type(visual).__name__}; supported: VisionTransformer. Write its blocks by hand "
            "(docs/pipeline.md); an nn.Sequential of its parts can be listed by pipeline.adapters.sequential"
        )
    refuse_subclass(visual, VisionTransformer)
    if visual.attn_pool is not None or visual.output_tokens or visual.pool_type not in ("tok", "avg"):
        raise ValueError(
            "the image tower pools by attention or gives tokens (CoCa); supported: pool_type 'tok' or 'avg', "
            "output_tokens False"
        )
    return [
        Block("visual.embed", ImageEmbedding(visual), ("image",), ("image_hidden",)),
        *(
            Block(f"visual.layers.{i}", TowerLayer(layer), ("image_hidden",), ("image_hidden",))
            for i, layer in enumerate(visual.transformer.resblocks)
        ),
        Block("visual.pool", ImagePool(visual, normalize=normalize), ("image_hidden",), ("image_features",)),
    ]


def _text_blocks(model: Any, *, normalize: bool) -> list[Block]:
    if isinstance(model, CLIP):
        text, pool_type, eos_id = model, model.text_pool_type, model.text_eos_id
    else:
        text = model.text
        if not isinstance(text, TextTransformer):
            raise ValueError(f"the text tower is a {type(text).__name__}; supported: TextTransformer of open_clip")
        refuse_subclass(text, TextTransformer)
        if text.cls_emb is not None or text.use_pad_mask or text.output_tokens:
            raise ValueError(
                "the text tower has a class token, a padding mask or gives tokens (CoCa); supported: embed_cls, "
                "use_pad_mask and output_tokens False"
            )
        pool_type, eos_id = text.pool_type, text.eos_id
    if pool_type == "none":
        raise ValueError("the text tower's pool_type is 'none'; supported: 'first', 'last', 'argmax', 'eos'")
    blocks = [Block("text.embed", TextEmbedding(text), ("text",), ("text_hidden",))]
    mask: tuple[str, ...] = ()
    if text.attn_mask is not None:
        mask = ("text_mask",)
        blocks.append(table("text.mask", TextMask(text.attn_mask), reads=("text",), writes=mask))
    for i, layer in enumerate(text.transformer.resblocks):
        blocks.append(Block(f"text.layers.{i}", TowerLayer(layer), ("text_hidden", *mask), ("text_hidden",)))
    pool = TextPool(text, pool_type=pool_type, eos_id=eos_id, normalize=normalize)
    return [*blocks, Block("text.pool", pool, ("text_hidden", "text"), ("text_features",))]
