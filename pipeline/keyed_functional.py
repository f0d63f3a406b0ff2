"""Functional dropout made keyed, inside modules that call it from their own ``forward``.

Many attention modules do not hold an ``nn.Dropout``: they keep a float and call ``functional.dropout`` or
``functional.scaled_dot_product_attention(dropout_p=...)``. Within `keyed_functional` those calls draw from
`pipeline.keyed` instead of generator state. The price is the fused kernel: attention with dropout is written
out as products and a softmax, whose weights (N, H, L, S) are then saved. Calls with probability 0 and calls
outside of training go to the original functions.

N: rows (a multiple of the micro-batch's samples), H: heads, L / S: query / key length, E: width, D: E / H.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pipeline import keyed


class keyed_functional(TorchFunctionMode):
    """Context in which functional dropout and attention dropout are keyed.

    Raises:
        RuntimeError: from inside, for random functions that have no keyed form here (alpha dropout, RReLU).
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        replacement = REPLACED.get(func)
        return replacement(*args, **(kwargs or {})) if replacement else func(*args, **(kwargs or {}))


def _dropout(original: Callable[..., Tensor], shared_dims: int) -> Callable[..., Tensor]:
    def call(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return original(input, p, training, inplace)
        if shared_dims and input.dim() != shared_dims + 2:
            raise RuntimeError(
                f"keyed {original.__name__} got {input.dim()} dimensions; it needs {shared_dims + 2}, (rows, channels, "
                "...), because without rows it cannot tell whose channels they are"
            )
        return keyed.dropout(input, p, shared_dims=shared_dims, inplace=inplace)

    return call


def _refused(original: Callable[..., Tensor], default_training: bool) -> Callable[..., Tensor]:
    def call(*args: Any, training: bool = default_training, **kwargs: Any) -> Tensor:
        if training:
            raise RuntimeError(
                f"{original.__name__} draws from generator state and has no keyed form; masks would depend on how "
                "the batch is cut. Use ordinary dropout, or set its probability to 0 (eval mode for RReLU)"
            )
        return original(*args, training=training, **kwargs)

    return call


def _masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Scores with a mask on top: boolean (True: attend) or added."""
    if mask is None:
        return scores
    return scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask


def _weights(scores: Tensor, p: float) -> Tensor:
    """Softmax and keyed dropout; 0 where everything is masked, as in torch."""
    dead = scores.isneginf().all(-1, keepdim=True)
    weights = scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
    return keyed.dropout(weights, p)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p == 0.0:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return _weights(_masked(scores, attn_mask), dropout_p) @ value


def _multihead(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """``functional.multi_head_attention_forward``; query (L, N, E), key and value (S, N, E)."""
    static = more.get("static_k") is not None or more.get("static_v") is not None
    if not training or dropout_p == 0.0:
        weights = {"q_proj_weight": q_proj_weight, "k_proj_weight": k_proj_weight, "v_proj_weight": v_proj_weight}
        return functional.multi_head_attention_forward(
            query, key, value, embed_dim_to_check, num_heads, in_proj_weight, in_proj_bias, bias_k, bias_v,
            add_zero_attn, dropout_p, out_proj_weight, out_proj_bias, training, key_padding_mask, need_weights,
            attn_mask, use_separate_proj_weight, average_attn_weights=average_attn_weights, is_causal=is_causal,
            **weights, **more,
        )  # fmt: skip
    if bias_k is not None or bias_v is not None or add_zero_attn or static or query.dim() != 3:
        raise RuntimeError(
            "keyed multi-head attention with dropout takes batched input and no bias_k, bias_v, add_zero_attn, "
            "static_k or static_v; set the attention's dropout to 0 to keep those"
        )
    if in_proj_weight is not None and not use_separate_proj_weight:
        wq, wk, wv = in_proj_weight.chunk(3)
    else:
        assert q_proj_weight is not None and k_proj_weight is not None and v_proj_weight is not None
        wq, wk, wv = q_proj_weight, k_proj_weight, v_proj_weight
    bq, bk, bv = in_proj_bias.chunk(3) if in_proj_bias is not None else (None, None, None)

    def heads(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # (L, N, E) -> (N, H, L, D)
        return functional.linear(x, weight, bias).unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)

    q, k, v = heads(query, wq, bq), heads(key, wk, bk), heads(value, wv, bv)
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if attn_mask is not None:  # in this function a boolean mask says what not to attend to
        mask = attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (-1, num_heads))
        scores = _masked(scores, ~mask if mask.dtype == torch.bool else mask)
    if key_padding_mask is not None:
        mask = key_padding_mask[:, None, None, :]
        scores = _masked(scores, ~mask if mask.dtype == torch.bool else mask)
    weights_NHLS = _weights(scores, dropout_p)
    out = (weights_NHLS @ v).permute(2, 0, 1, 3).flatten(2)
    out = functional.linear(out, out_proj_weight, out_proj_bias)
    if not need_weights:
        return out, None
    return out, weights_NHLS.mean(1) if average_attn_weights else weights_NHLS


REPLACED: Mapping[Any, Callable[..., Any]] = {
    functional.dropout: _dropout(functional.dropout, 0),
    functional.dropout1d: _dropout(functional.dropout1d, 1),
    functional.dropout2d: _dropout(functional.dropout2d, 2),
    functional.dropout3d: _dropout(functional.dropout3d, 3),
    functional.scaled_dot_product_attention: _attention,
    functional.multi_head_attention_forward: _multihead,
    functional.alpha_dropout: _refused(functional.alpha_dropout, False),
    functional.feature_alpha_dropout: _refused(functional.feature_alpha_dropout, False),
    functional.rrelu: _refused(functional.rrelu, False),
}
