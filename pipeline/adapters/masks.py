"""Attention masks as blocks of their own, made by the functions of ``transformers`` itself.

B rows, Q query positions, K key positions (Q, or Q and the cached ones before). ``transformers`` leaves a
mask out where no row is padded; that depends on all rows together and on data, so here a mask that is
read is always written out. It costs memory traffic and fused causal kernels, and nothing in the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_causal_mask_function,
)


def attention_of(config: Any) -> str:
    """Name of the attention implementation that a configuration asks for now."""
    return config._attn_implementation


def _no_mask(**_: Any) -> None:
    return None


class AttentionMask(nn.Module):
    """Base: calls the mask function that belongs to the model's attention implementation."""

    def __init__(self, config: Any, like: nn.Module) -> None:
        super().__init__()
        self.config = config
        # In a tuple, so that it is not registered: only the floating-point type of its weights is asked for.
        self._like = (like,)

    def _make(self, ids_BQ: Tensor, mask_BK: Tensor | None, function: Any, *, hide_padding: bool = True) -> Tensor:
        """``hide_padding``: hide what ``mask_BK`` says; otherwise ``function`` has done it."""
        name = attention_of(self.config)
        num_rows, num_queries = ids_BQ.shape[:2]
        num_keys = num_queries if mask_BK is None else mask_BK.shape[1]
        make = ALL_MASK_ATTENTION_FUNCTIONS.get(name, _no_mask)
        mask = make(
            batch_size=num_rows if mask_BK is not None else 1,
            q_length=num_queries,
            kv_length=num_keys,
            q_offset=num_keys - num_queries,
            kv_offset=0,
            mask_function=function,
            attention_mask=None if mask_BK is None or not hide_padding else mask_BK.to(ids_BQ.device, torch.bool),
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            dtype=next(self._like[0].parameters()).dtype,
            config=self.config,
            use_vmap=False,
            device=ids_BQ.device,
        )
        if not isinstance(mask, Tensor) or mask.dim() != 4:
            raise ValueError(
                f"attention implementation {name!r} makes no mask tensor (B, 1, Q, K) that could be sent to "
                "another stage; call model.set_attn_implementation('sdpa') or ('eager')"
            )
        return mask


class BidirectionalMask(AttentionMask):
    """Which keys each query sees where only padding is hidden."""

    def forward(self, ids_BQ: Tensor, mask_BK: Tensor) -> Tensor:
        """(B, 1, Q, K) from anything with B rows and Q positions, and a mask that is 0 at padding.

        The mask is (B, K), or (B*k, M) for B*k documents that are read one after the other: K = k*M.
        """
        mask_BK = mask_BK.reshape(ids_BQ.shape[0], -1)
        # All queries see the same keys, so one is made and repeated (a view, without memory of its own).
        one_B11K = self._make(ids_BQ[:, :1], mask_BK, bidirectional_mask_function)
        return one_B11K.expand(-1, -1, ids_BQ.shape[1], -1)


class CausalMask(AttentionMask):
    """Which keys each query sees: itself and earlier ones, no padding, at most ``window`` back.

    Without a mask input the result is (1, 1, Q, Q), the same for every sample. With a mask longer than
    the queries (cached keys) the queries are the last positions.
    """

    def __init__(self, config: Any, like: nn.Module, *, window: int | None = None) -> None:
        super().__init__(config, like)
        self.window = window

    def forward(self, ids_BQ: Tensor, mask_BK: Tensor | None = None) -> Tensor:
        """(B, 1, Q, K) from token ids (B, Q) and a mask (B, K) that is 0 at padding; or (1, 1, Q, Q)."""
        if mask_BK is not None and mask_BK.shape[1] < ids_BQ.shape[1]:
            raise ValueError(
                f"the attention mask has {mask_BK.shape[1]} positions and there are {ids_BQ.shape[1]} tokens; "
                "it must cover them (and cached ones before them)"
            )
        function = causal_mask_function if self.window is None else sliding_window_causal_mask_function(self.window)
        return self._make(ids_BQ, mask_BK, function)
