"""What transformer layers of decoders need around them to be blocks.

B samples, L positions, K positions with cached ones, D width, H head width. The layer itself stays the model's
own module, at ``block.module.layer``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache

from pipeline.adapters.masks import attention_of


class CachedLayer(nn.Module):
    """A decoder layer that can see the keys and values of earlier calls.

    `extend` keeps them where `pipeline.generate` says. By hand: set ``cache`` to a ``transformers.Cache``, which
    all layers of a stage may share, made without a configuration (``DynamicCache()``): sliding windows are in
    the mask, so all keys are kept.

    Attributes:
        layer: the model's own module.
        cache: a ``transformers.Cache``, or None to see nothing but what is given.
    """

    def __init__(self, layer: nn.Module, *, layer_index: int, unknown: str = "") -> None:
        """``unknown``: the option that would tell positions behind cached ones; "" if they are known."""
        super().__init__()
        self.layer = layer
        self.cache: Any = None
        self._layer_index, self._unknown = layer_index, unknown

    def new_cache(self) -> Any:
        """A cache of the kind that the layer takes."""
        return DynamicCache()

    def extend(self, kept: dict[str, Any], *reads: Tensor) -> Tensor:
        """``forward`` on new positions; the cache with the earlier ones is in ``kept``."""
        if "cache" not in kept:
            kept["cache"] = self.new_cache()
        before, self.cache = self.cache, kept["cache"]
        try:
            return self(*reads)
        finally:
            self.cache = before

    def _options(self, num_new: int, mask: Tensor | None) -> dict[str, Any]:
        """The layer's cache argument; refuses cached positions that the other arguments do not know of."""
        if self.cache is None:
            return {}
        cached = self.cache.get_seq_length(self._layer_index)
        if cached and self._unknown:
            raise ValueError(
                f"{num_new} tokens follow {cached} cached ones, but the program does not know their positions; "
                f"build it with {self._unknown}"
            )
        if cached and (mask is None or mask.shape[-1] != cached + num_new):
            keys = "no mask" if mask is None else f"a mask over {mask.shape[-1]} positions"
            raise ValueError(
                f"{num_new} tokens follow {cached} cached ones, but there is {keys}; "
                f"the attention mask must cover all {cached + num_new}"
            )
        return {"cache": self.cache}


class CausalLayer(CachedLayer):
    """A layer of a causal decoder; knows when it cannot do without a mask."""

    def __init__(self, layer: nn.Module, *, layer_index: int, config: Any, positions: bool) -> None:
        super().__init__(layer, layer_index=layer_index, unknown="" if positions else "positions=True")
        self._config = config

    def _options(self, num_new: int, mask: Tensor | None) -> dict[str, Any]:
        if mask is None and attention_of(self._config) != "sdpa":
            raise ValueError(
                f"the attention implementation became {attention_of(self._config)!r} after the program was built; "
                "build the program again"
            )
        return super()._options(num_new, mask)


class RotaryLayer(CausalLayer):
    """A Llama-style layer: rotary tables are computed once and read by every layer."""

    def forward(self, hidden_BLD: Tensor, cos: Tensor, sin: Tensor, mask_B1LK: Tensor | None = None) -> Tensor:
        """(B, L, D); tables are (1, L, H) or (B, L, H)."""
        options = self._options(hidden_BLD.shape[1], mask_B1LK)
        return self.layer(hidden_BLD, attention_mask=mask_B1LK, position_embeddings=(cos, sin), **options)


class PlainLayer(CausalLayer):
    """A GPT-2 layer: positions are in the embedding."""

    def forward(self, hidden_BLD: Tensor, mask_B1LK: Tensor | None = None) -> Tensor:
        """(B, L, D)."""
        options = self._options(hidden_BLD.shape[1], mask_B1LK)
        return self.layer(hidden_BLD, attention_mask=mask_B1LK, **options)
