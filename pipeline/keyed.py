"""Keyed randomness: every draw is a function of what it is for, never of generator state.

A draw is hashed from (seed, step, block name, call within the block's forward, global sample id, row of
the sample, element of the row). Masks then do not depend on how a batch is cut into micro-batches,
stages or replicas, nor on the device. The price is arithmetic: seven int64 operations an element, about
the cost of a slow generator, in exchange for layouts that agree and nothing to checkpoint.

Quality: each row has a 64-bit key from a full splitmix64 chain. Element ``e`` is two xor-shift-multiply
rounds of ``key + e * golden`` (splitmix64 without its last xor-shift), of which only the top bits are
used. Torch shifts int64 arithmetically, so ``x`` and ``~x`` give the same value; two elements of a
tensor of n are such a pair with probability n^2 / 2^64. Uniformity and independence over elements, rows,
samples, steps and calls are tested; this is for masks and noise, not for cryptography.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


@dataclass
class _Block:
    name: str
    ids: Tensor | None
    call: int = field(default=0)


_scope: ContextVar[tuple[int, int] | None] = ContextVar("keyed_scope", default=None)
_block: ContextVar[_Block | None] = ContextVar("keyed_block", default=None)


def seed_of(*parts: int | str) -> int:
    """A stable 64-bit hash (0 <= h < 2^64) of integers and strings; the same on every machine and run."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, int | str):
            raise ValueError(f"seed_of takes integers and strings, not {part!r}")
        text = f"{'i' if isinstance(part, int) else 's'}{part}".encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return int.from_bytes(digest.digest(), "little")


@contextmanager
def scope(*, seed: int, step: int) -> Iterator[None]:
    """Set seed and step for all draws inside; once a training step."""
    token = _scope.set((int(seed), int(step)))
    try:
        yield
    finally:
        _scope.reset(token)


@contextmanager
def block(name: str, *, ids: Tensor | None) -> Iterator[None]:
    """Name the block that draws, and the global ids (int64, B) of its samples. Set by the program."""
    token = _block.set(_Block(name, ids))
    try:
        yield
    finally:
        _block.reset(token)


@contextmanager
def rows(ids: Tensor) -> Iterator[None]:
    """Inside a block: draws are for these rows (global ids, int64, U) instead of the block's samples.

    For tensors whose rows are no samples, such as the unique documents of a batch: a document then has
    one draw a step, however many samples of whichever micro-batch use it.

    Raises:
        RuntimeError: outside of a block.
    """
    here = _block.get()
    if here is None:
        raise RuntimeError("keyed.rows changes whose rows a block draws for; there is no block here (keyed.block)")
    before, here.ids = here.ids, ids
    try:
        yield
    finally:
        here.ids = before


def _signed(value: int) -> int:
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _splitmix(x: Tensor) -> Tensor:
    """Full splitmix64 finaliser with logical shifts; for the few row keys."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _signed(_MIX_1)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _signed(_MIX_2)
    return x ^ ((x >> 31) & (2**33 - 1))


def _row_keys(rows_per_sample: int) -> Tensor:
    """(B * rows_per_sample,) keys of this draw; advances the block's call counter."""
    now, here = _scope.get(), _block.get()
    if now is None or here is None:
        raise RuntimeError(
            "a keyed draw needs its seed, step and samples: run the module in a block program inside "
            "`with keyed.scope(seed=..., step=...)` (Pipeline.step does both), or call eval() on it. In a backward: "
            "activations are recomputed without them; use keyed.checkpoint, or enable gradient checkpointing before "
            "make_keyed, which then replaces it"
        )
    if here.ids is None:
        raise RuntimeError(
            f"block {here.name!r} draws keyed random numbers, but the batch has no 'sample_id'; "
            "list 'sample_id' (int64, one a sample) in the program's inputs"
        )
    base = _signed(seed_of(*now, here.name, here.call))
    here.call += 1
    sample_B = _splitmix(_splitmix(here.ids.long() + base) ^ base)
    slot_K = torch.arange(rows_per_sample, device=sample_B.device) * _signed(_GOLDEN)
    return _splitmix(sample_B[:, None] + slot_K).reshape(-1)


def bits(shape_of_row: tuple[int, ...], *, rows_per_sample: int = 1) -> Tensor:
    """Random int64, shape (B * rows_per_sample, *shape_of_row); use the top bits (compare, do not mask)."""
    keys = _row_keys(rows_per_sample)
    x = torch.arange(math.prod(shape_of_row), device=keys.device).mul_(_signed(_GOLDEN))
    return _mix(keys[:, None] + x).view(-1, *shape_of_row)


def _mix(x: Tensor) -> Tensor:
    """Two rounds, in place: after one, neighbouring bits of the input show in the top bits of the result."""
    x.bitwise_xor_(x >> 30).mul_(_signed(_MIX_1))
    return x.bitwise_xor_(x >> 27).mul_(_signed(_MIX_2))


def uniform(shape_of_row: tuple[int, ...], *, rows_per_sample: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform draws in [0, 1), shape (B * rows_per_sample, *shape_of_row), on the device of the sample ids.

    Values are multiples of 2^-24 (2^-53 for float64), so that they are exact in ``dtype``.
    """
    num_bits = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}.get(dtype)
    if num_bits is None:
        raise ValueError(f"uniform draws floating-point numbers, not {dtype}")
    top = (bits(shape_of_row, rows_per_sample=rows_per_sample) >> (64 - num_bits)) + 2 ** (num_bits - 1)
    return top.to(torch.float64 if num_bits > 24 else torch.float32).mul_(2.0**-num_bits).to(dtype)


def dropout(x: Tensor, p: float, *, shared_dims: int = 0, inplace: bool = False) -> Tensor:
    """Dropout whose mask depends on the sample, not on where and with whom it is computed.

    Args:
        x: (rows, ...); rows must be a multiple of the B samples of the micro-batch, and the rows of a
            sample adjacent.
        p: probability of a zero, in [0, 1); what is left is multiplied by 1 / (1 - p).
        shared_dims: so many trailing dimensions share one draw (2: whole channels of (rows, C, H, W)).
        inplace: write into ``x``.

    Raises:
        ValueError: for another ``p``.
        RuntimeError: outside of a block and scope, or for rows that do not fit the samples.
    """
    _check_probability(p)
    if p == 0.0:
        return x
    here = _block.get()
    num_samples = x.shape[0] if here is None or here.ids is None else here.ids.shape[0]
    if x.shape[0] % num_samples:
        raise RuntimeError(
            f"keyed dropout in block {here.name if here else '?'!r} got {x.shape[0]} rows for "
            f"{num_samples} samples; the leading dimension must be a multiple of the samples "
            "(for rows that are not samples: `with keyed.rows(ids)`)"
        )
    drawn = tuple(x.shape[1 : x.dim() - shared_dims])
    draw = bits(drawn, rows_per_sample=x.shape[0] // num_samples)
    keep = draw >= _signed(int(p * 2**64) + 2**63)
    mask = keep.to(x.dtype).mul_(1.0 / (1.0 - p)).view(x.shape[0], *drawn, *(1,) * shared_dims)
    return x.mul_(mask) if inplace else x * mask


def _check_probability(p: float) -> None:
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout probability p is {p}; it must be in [0, 1)")


class KeyedDropout(nn.Module):
    """`dropout` as a module. Identity in eval mode or for ``p = 0``."""

    def __init__(self, p: float = 0.1, *, shared_dims: int = 0, inplace: bool = False) -> None:
        super().__init__()
        _check_probability(p)
        self.p, self.shared_dims, self.inplace = p, shared_dims, inplace

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return dropout(x, self.p, shared_dims=self.shared_dims, inplace=self.inplace)

    def extra_repr(self) -> str:
        more = f", shared_dims={self.shared_dims}" if self.shared_dims else ""
        return f"p={self.p}{more}{', inplace=True' if self.inplace else ''}"


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Activation checkpointing that repeats the same draws when it recomputes in the backward."""
    now, here = _scope.get(), _block.get()
    start, ids = (here.call, here.ids) if here is not None else (0, None)  # `rows` puts other ids back later

    @contextmanager
    def replay() -> Iterator[None]:
        tokens = _scope.set(now), _block.set(_Block(here.name, ids, start) if here is not None else None)
        try:
            yield
        finally:
            _scope.reset(tokens[0])
            _block.reset(tokens[1])

    @contextmanager
    def as_is() -> Iterator[None]:
        yield

    return torch_checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: (as_is(), replay())
    )
