"""What each block costs and whom its rows depend on, for one micro-batch.

Each block runs by itself on detached inputs, so its backward is timed alone and its saved activations
are its own. Measured alone on an idle machine, times are too small by 11 to 22 % for a machine whose
ranks are all busy: trace with all ranks at once where that matters.

A model that does not fit is built under ``torch.device("meta")`` and traced with a batch of meta tensors and
a `pipeline.device.Device`: then times follow from FLOPs and bytes (docs/lineage.md says how well), and
lineage, which needs values, has to be found on a smaller model of the same blocks.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from pipeline.device import Device
from pipeline.fingerprint import UnknownObject
from pipeline.isolate import advance, call, cut_off, unchanged_buffers
from pipeline.lineage import Lineage, classify, within_microbatch
from pipeline.operation_costs import OperationCosts
from pipeline.parameter_ties import partial_ties
from pipeline.profile import BlockProfile, Profile
from pipeline.program import SAMPLE_ID, Block, BlockProgram, nearest
from pipeline.synchronised_norm import norm_statistics
from pipeline.trace_cache import load, store, trace_key

__all__ = ["BlockProfile", "Profile", "trace"]

Progress = Callable[[int, int, str], None]
_UNKNOWN = Lineage("unknown", False, "")


CACHE_BYTES = 64 << 20


@dataclass(frozen=True)
class _Cost:
    forward_s: float
    backward_s: float
    flops: int
    backward_flops: int
    bytes_moved: int
    activation_bytes: int
    written_bytes: int


def trace(
    program: BlockProgram,
    batch: Mapping[str, Tensor],
    *,
    num_microbatches: int,
    repeats: int = 3,
    warmup: int = 1,
    lineage: bool = True,
    lineage_samples: int | None = None,
    device: Device | None = None,
    progress: Progress | None = None,
    cache_dir: str | Path | None = None,
    busy_ranks: int = 1,
    around: AbstractContextManager[object] | None = None,
    agree: Callable[[Profile | None], Profile | None] | None = None,
) -> Profile:
    """Measure every block on the first ``B / num_microbatches`` samples of a batch.

    Changes no gradient and no buffer. With ``lineage``, each block's cross-sample dependencies are
    found by experiment (see `pipeline.lineage`) on the first ``lineage_samples`` of the batch, or all of it; the
    experiment costs 24 log2(samples) forwards and 10 log2(samples) backwards, and few samples can miss what
    only a full batch shows (a capacity that is reached). Without ``lineage`` every block is ``"unknown"``.

    Args:
        device: for a program and batch on the meta device: what the times are predicted for.
        progress: called with (blocks done, blocks, name of the next one), at the end with "traced" or "cached"; first
            of all with "not cached: ..." where that cannot be.
        cache_dir: where profiles are kept, by a key over the blocks' code, configuration and parameter shapes,
            the batch's shapes, these options, the machine and torch. Values of weights and batch are not in it: a
            NaN or a mixing that depends on them is not looked for again. A program with an object whose behaviour
            cannot be told (`pipeline.fingerprint`) is traced anew each time.
        busy_ranks: how many ranks of a machine trace at the same time, which the caller sees to; part of the key and of
            the profile's ``device``.
        around: entered while blocks run, not where the cache has the profile.
        agree: given what the cache has (None: nothing), what is taken instead; for ranks that must trace all or none.

    Raises:
        ValueError: if the batch lacks an input or does not divide, a block gives NaN forward or backward (the error
            names it), or values are needed of meta tensors.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats is {repeats} and warmup {warmup}; at least 1 and 0 are needed")
    for name in program.inputs_of(0, len(program.blocks)):
        if name not in batch:
            raise ValueError(f"the batch lacks input {name!r}, which a block reads{nearest(name, batch)}")
    num_samples = program.num_samples(batch)
    if num_microbatches < 1 or num_samples % num_microbatches:
        possible = ", ".join(str(m) for m in range(1, num_samples + 1) if num_samples % m == 0)
        raise ValueError(
            f"a batch of {num_samples} samples does not divide into {num_microbatches} micro-batches; use one of "
            f"{possible}"
        )
    _check_device(program, batch, device, lineage=lineage)
    machine = device.name if device else _machine(batch)
    machine += f", {busy_ranks} ranks at once" if busy_ranks > 1 else ""
    tell: Progress = progress or (lambda done, total, name: None)
    path = None
    if cache_dir is not None:
        options = (num_microbatches, repeats, warmup, lineage, lineage_samples, repr(device), machine)
        try:
            path = Path(cache_dir) / f"trace-{trace_key(program, batch, options)}.json"
        except UnknownObject as error:
            tell(0, len(program.blocks), f"not cached: {error}")
    found = None if path is None else load(path)
    found = agree(found) if agree else found
    if found is not None:
        tell(len(program.blocks), len(program.blocks), "cached")
        return found
    with around or nullcontext():
        profile = _trace(
            program, batch, num_microbatches=num_microbatches, repeats=repeats, warmup=warmup, lineage=lineage,
            lineage_samples=lineage_samples, device=device, tell=tell,
        )  # fmt: skip
    profile = replace(profile, device=machine)
    if path is not None:
        store(path, profile)
    tell(len(program.blocks), len(program.blocks), "traced")
    return profile


def _trace(
    program: BlockProgram,
    batch: Mapping[str, Tensor],
    *,
    num_microbatches: int,
    repeats: int,
    warmup: int,
    lineage: bool,
    lineage_samples: int | None,
    device: Device | None,
    tell: Progress,
) -> Profile:
    num_samples = program.num_samples(batch)
    micro = program.microbatch({n: t.detach() for n, t in batch.items()}, 0, num_microbatches)
    few = num_samples if lineage_samples is None else min(lineage_samples, num_samples)
    whole = {
        name: tensor.detach()[: tensor.shape[0] // num_samples * few] if program.has_samples(name) else tensor.detach()
        for name, tensor in batch.items()
    }
    wants = {name for name, tensor in batch.items() if tensor.requires_grad}
    profiles, carry_bytes, gradient_bytes, recomputable_carries = [], [], [], []
    again = {name for block in program.blocks if block.recomputable for name in block.writes}
    partial = partial_ties(program)
    with unchanged_buffers(program), norm_statistics("rank"):
        for i, block in enumerate(program.blocks):
            tell(i, len(program.blocks), block.name)
            found = classify(program, block, whole, grads=wants) if lineage else _UNKNOWN
            whole = advance(block, whole) if lineage else whole
            if device is None:
                cost, written = _measure(block, micro, wants, repeats=repeats, warmup=warmup)
            else:
                cost, written = _count(block, micro, wants, device)
            if lineage:
                found = within_microbatch(program, block, found, whole=whole, micro=written)
            profiles.append(_block_profile(program, block, cost, found, partial[block.name]))
            micro = {**micro, **{name: tensor.detach() for name, tensor in written.items()}}
            wants = (wants - set(block.writes)) | {name for name, tensor in written.items() if tensor.requires_grad}
            last = i + 1 == len(program.blocks)
            carry = {} if last else {name: _bytes(micro[name]) for name in program.carry(i + 1)}
            carry_bytes.append(sum(carry.values()))
            gradient_bytes.append(sum(size for name, size in carry.items() if name in wants))
            recomputable_carries.append({name: size for name, size in carry.items() if name in again})
    return Profile(
        tuple(profiles), tuple(carry_bytes), num_microbatches, num_samples,
        recomputable_carries=tuple(recomputable_carries), outputs=program.outputs, gradient_bytes=tuple(gradient_bytes),
    )  # fmt: skip


def _check_device(program: BlockProgram, batch: Mapping[str, Tensor], device: Device | None, *, lineage: bool) -> None:
    tensors = {**batch, **dict(program.named_parameters()), **dict(program.named_buffers())}
    meta = sorted(name for name, tensor in tensors.items() if tensor.is_meta)
    if not meta and device is not None:
        raise ValueError(f"device is {device.name!r}, but the program has values; times of real tensors are measured")
    if not meta:
        return
    if len(meta) < len(tensors):
        other = next(name for name, tensor in tensors.items() if not tensor.is_meta)
        raise ValueError(f"{meta[0]!r} is on the meta device and {other!r} is not; put program and batch on one device")
    if device is None:
        raise ValueError(
            "the program is on the meta device; say what to predict for, such as "
            "device=pipeline.calibration.device_of('a100-40gb')"
        )
    if lineage:
        raise ValueError(
            "lineage needs values, and the program is on the meta device: trace with lineage=False, and find the "
            "lineage on a smaller model of the same blocks"
        )


def _block_profile(
    program: BlockProgram, block: Block, cost: _Cost, found: Lineage, partial: dict[str, int]
) -> BlockProfile:
    names = program.block_parameters(block.name)
    shared = {
        name for other in program.blocks if other.name != block.name for name in program.block_parameters(other.name)
    }
    return BlockProfile(
        name=block.name,
        forward_s=cost.forward_s,
        backward_s=cost.backward_s,
        flops=cost.flops,
        parameter_bytes=sum(_bytes(p) for p in names.values()),
        activation_bytes=cost.activation_bytes,
        written_bytes=cost.written_bytes,
        lineage=found.kind,
        stateful=found.stateful,
        mixes=found.mixes,
        ties={name: _bytes(p) for name, p in names.items() if name in shared},
        recomputable=block.recomputable,
        reads=block.reads,
        writes=block.writes,
        shared=found.shared,
        frozen_bytes=sum(_bytes(p) for p in names.values() if not p.requires_grad),
        partial_ties=partial,
        backward_flops=cost.backward_flops,
        bytes_moved=cost.bytes_moved,
        synchronised=found.synchronised,
        changes=found.changes,
    )


def _measure(
    block: Block, env: Mapping[str, Tensor], wants: set[str], *, repeats: int, warmup: int
) -> tuple[_Cost, dict[str, Tensor]]:
    """Median times, and counts from one more run, untimed: counting costs time.

    In a step other blocks run between two calls of a block, and gradients of micro-batches are added up. So the
    caches are emptied before each forward, and the backward adds its gradients to what stands for ``.grad``.
    """
    forward_s, backward_s = [], []
    sums = {name: torch.zeros_like(p) for name, p in block.module.named_parameters() if p.requires_grad}
    for _ in range(warmup + repeats):
        inputs = cut_off(block, env, wants)
        _empty_caches(env)
        start = _now(env)
        written = call(block, inputs, ids=env.get(SAMPLE_ID))
        forward_s.append(_now(env) - start)
        for name, tensor in written.items():
            if tensor.is_floating_point() and tensor.isnan().any():
                raise ValueError(f"block {block.name!r} gives NaN in {name!r} on the traced batch")
        start = _now(env)
        gradients = _backward(block, inputs, written)
        for name, gradient in gradients:
            if name in sums:
                sums[name].add_(gradient)
        backward_s.append(_now(env) - start if gradients else 0.0)
        for name, gradient in gradients:
            if gradient.isnan().any():
                raise ValueError(
                    f"block {block.name!r} gives NaN in the gradient of {name!r} on the traced batch, although its "
                    "outputs have none; look for a root, norm or logarithm of 0, or a division that torch.where hides"
                )
    cost, written = _count(block, env, wants, None)
    times = (statistics.median(forward_s[warmup:]), statistics.median(backward_s[warmup:]))
    return replace(cost, forward_s=times[0], backward_s=times[1]), written


def _count(
    block: Block, env: Mapping[str, Tensor], wants: set[str], device: Device | None
) -> tuple[_Cost, dict[str, Tensor]]:
    """FLOPs and bytes of one run, and times on the device described (0 without one)."""
    inputs = cut_off(block, env, wants)
    saved: dict[int, int] = {}
    own = {_storage(t) for t in (*block.module.parameters(), *block.module.buffers(), *inputs.values())}
    try:
        with _saving(saved, own), OperationCosts(device) as forward:
            written = call(block, inputs, ids=env.get(SAMPLE_ID))
        with OperationCosts(device) as backward:
            _backward(block, inputs, written)
    except NotImplementedError as error:
        raise ValueError(
            f"block {block.name!r} cannot be traced on the meta device: what it does depends on values "
            f"({str(error).strip().partition(chr(10))[0]})"
        ) from error
    new = {_storage(t): t.untyped_storage().nbytes() for t in written.values()}
    written_bytes = sum(size for key, size in new.items() if key not in saved and key not in own)
    cost = _Cost(
        forward.seconds, backward.seconds, forward.flops, backward.flops, forward.bytes_moved,
        sum(saved.values()), written_bytes,
    )  # fmt: skip
    return cost, written


def _backward(block: Block, inputs: Mapping[str, Tensor], written: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Run the block's backward, from ones; named gradients, none if there is nothing to train in it or before it."""
    roots = [t for t in written.values() if t.requires_grad]
    named = (*block.module.named_parameters(), *inputs.items())
    wanted = [(name, t) for name, t in named if t.requires_grad]
    if not roots or not wanted:
        return []
    ones = [torch.ones_like(t) for t in roots]
    found = torch.autograd.grad(roots, [t for _, t in wanted], ones, allow_unused=True)
    return [(name, gradient) for (name, _), gradient in zip(wanted, found, strict=True) if gradient is not None]


def _saving(saved: dict[int, int], own: set[int]) -> torch.autograd.graph.saved_tensors_hooks:
    def pack(tensor: Tensor) -> Tensor:
        key = _storage(tensor)
        if key not in own:
            saved[key] = tensor.untyped_storage().nbytes()
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # meta tensors have no data pointer


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _machine(batch: Mapping[str, Tensor]) -> str:
    device = next(iter(batch.values())).device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    models = (
        [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return f"{models[0] if models else platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


@lru_cache(maxsize=1)
def _filler() -> Tensor:
    return torch.zeros(CACHE_BYTES, dtype=torch.uint8)


def _empty_caches(env: Mapping[str, Tensor]) -> None:
    """Write more than a processor's caches hold."""
    if next(iter(env.values())).device.type == "cpu":
        _filler().add_(1)


def _now(env: Mapping[str, Tensor]) -> float:
    device = next(iter(env.values())).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
