"""What each block costs and whom its rows depend on, measured on one micro-batch.

Each block runs by itself on detached inputs, so its backward is timed alone and its saved activations
are its own. Measured alone on an idle machine, times are too small by 11 to 22 % for a machine whose
ranks are all busy: trace with all ranks at once where that matters.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pipeline.isolate import advance, call, cut_off, unchanged_buffers
from pipeline.lineage import Lineage, classify
from pipeline.program import SAMPLE_ID, Block, BlockProgram


@dataclass(frozen=True)
class BlockProfile:
    """Costs of one block for one micro-batch.

    Attributes:
        forward_s, backward_s: median seconds.
        flops: of the forward.
        parameter_bytes: of all parameters it holds, shared ones included.
        activation_bytes: storages saved for its backward, without parameters and its inputs' storages.
        written_bytes: of what it writes, where that is not saved (and counted) already.
        lineage: whose rows move an output row: ``sample``, ``group`` or ``batch``.
        stateful: buffers change in the forward.
        mixes: where and how rows mix ("" if they do not).
        ties: canonical parameter name -> its bytes, for parameters that other blocks hold too.
        recomputable: the plan may have it computed again where its results are read (`pipeline.program`).
        reads, writes: names of tensors.
    """

    name: str
    forward_s: float
    backward_s: float
    flops: int
    parameter_bytes: int
    activation_bytes: int
    written_bytes: int
    lineage: str
    stateful: bool
    mixes: str
    ties: dict[str, int]
    recomputable: bool = False
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Profile:
    """A traced program.

    Attributes:
        carry_bytes: ``[i]`` is what crosses a cut after block i for a micro-batch (0 after the last), nothing
            being recomputed.
        recomputable_carries: ``[i]`` says which part of that recomputable blocks write, by name.
        outputs: names that the program leaves.
    """

    blocks: tuple[BlockProfile, ...]
    carry_bytes: tuple[int, ...]
    num_microbatches: int
    num_samples: int
    recomputable_carries: tuple[dict[str, int], ...] = ()
    outputs: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read what `to_json` wrote.

        Raises:
            ValueError: if it is something else.
        """
        try:
            data = json.loads(text)
            lists = ("carry_bytes", "recomputable_carries", "outputs")
            blocks = tuple(
                BlockProfile(
                    **{**block, "reads": tuple(block.get("reads", ())), "writes": tuple(block.get("writes", ()))}
                )
                for block in data.pop("blocks")
            )
            return cls(blocks, **{key: tuple(value) if key in lists else value for key, value in data.items()})
        except (json.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a profile written by this program ({error})") from error


def trace(
    program: BlockProgram,
    batch: Mapping[str, Tensor],
    *,
    num_microbatches: int,
    repeats: int = 3,
    warmup: int = 1,
    lineage: bool = True,
    lineage_samples: int | None = None,
) -> Profile:
    """Measure every block on the first ``B / num_microbatches`` samples of a batch.

    Changes no gradient and no buffer. With ``lineage``, each block's cross-sample dependencies are
    found by experiment (see `pipeline.lineage`) on the first ``lineage_samples`` of the batch, or all of it; the
    experiment costs samples * log(samples) forward and backward passes' worth, and few samples can miss what
    only a full batch shows (a capacity that is reached). Without ``lineage`` every block is ``"unknown"``.

    Raises:
        ValueError: if the batch does not divide, or a block gives NaN (the error names it).
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats is {repeats} and warmup {warmup}; at least 1 and 0 are needed")
    num_samples = program.num_samples(batch)
    if num_microbatches < 1 or num_samples % num_microbatches:
        raise ValueError(f"a batch of {num_samples} samples does not divide into {num_microbatches} micro-batches")
    micro = program.microbatch({n: t.detach() for n, t in batch.items()}, 0, num_microbatches)
    few = num_samples if lineage_samples is None else min(lineage_samples, num_samples)
    whole = {
        name: tensor.detach() if program.axis(name) is None else tensor.detach()[: tensor.shape[0] // num_samples * few]
        for name, tensor in batch.items()
    }
    wants = {name for name, tensor in batch.items() if tensor.requires_grad}
    profiles, carry_bytes, recomputable_carries = [], [], []
    again = {name for block in program.blocks if block.recomputable for name in block.writes}
    with unchanged_buffers(program):
        for i, block in enumerate(program.blocks):
            found = classify(program, block, whole, grads=wants) if lineage else Lineage("unknown", False, "")
            whole = advance(block, whole) if lineage else whole
            profile, micro, wants = _measure(program, block, micro, wants, found, repeats=repeats, warmup=warmup)
            profiles.append(profile)
            last = i + 1 == len(program.blocks)
            carry = {} if last else {name: _bytes(micro[name]) for name in program.carry(i + 1)}
            carry_bytes.append(sum(carry.values()))
            recomputable_carries.append({name: size for name, size in carry.items() if name in again})
    return Profile(
        tuple(profiles), tuple(carry_bytes), num_microbatches, num_samples,
        recomputable_carries=tuple(recomputable_carries), outputs=program.outputs,
    )  # fmt: skip


def _measure(
    program: BlockProgram,
    block: Block,
    env: Mapping[str, Tensor],
    wants: set[str],
    found: Lineage,
    *,
    repeats: int,
    warmup: int,
) -> tuple[BlockProfile, dict[str, Tensor], set[str]]:
    ids = env.get(SAMPLE_ID)
    parameters = [p for p in block.module.parameters() if p.requires_grad]
    forward_s, backward_s = [], []
    saved: dict[int, int] = {}
    written: dict[str, Tensor] = {}
    flops = written_bytes = 0
    for round_ in range(warmup + repeats + 1):
        counting = round_ == warmup + repeats  # once more, untimed, with hooks that cost time
        inputs = cut_off(block, env, wants)
        if counting:
            own = {_storage(t) for t in (*block.module.parameters(), *block.module.buffers(), *inputs.values())}
            with _saving(saved, own), FlopCounterMode(display=False) as counter:
                written = call(block, inputs, ids=ids)
            flops = counter.get_total_flops()
            new = {_storage(t): t.untyped_storage().nbytes() for t in written.values()}
            written_bytes = sum(size for key, size in new.items() if key not in saved and key not in own)
        else:
            start = _now(env)
            written = call(block, inputs, ids=ids)
            took = _now(env) - start
            forward_s += [took] if round_ >= warmup else []
        for name, tensor in written.items():
            if tensor.is_floating_point() and tensor.isnan().any():
                raise ValueError(f"block {block.name!r} gives NaN in {name!r} on the traced batch")
        roots = [t for t in written.values() if t.requires_grad]
        wanted = [*parameters, *(t for t in inputs.values() if t.requires_grad)]
        start = _now(env)
        if roots and wanted:
            torch.autograd.grad(roots, wanted, [torch.ones_like(t) for t in roots], allow_unused=True)
        took = _now(env) - start
        backward_s += [took] if warmup <= round_ < warmup + repeats else []
    names = program.block_parameters(block.name)
    shared = {
        name for other in program.blocks if other.name != block.name for name in program.block_parameters(other.name)
    }
    profile = BlockProfile(
        name=block.name,
        forward_s=statistics.median(forward_s),
        backward_s=statistics.median(backward_s),
        flops=int(flops),
        parameter_bytes=sum(_bytes(p) for p in names.values()),
        activation_bytes=sum(saved.values()),
        written_bytes=written_bytes,
        lineage=found.kind,
        stateful=found.stateful,
        mixes=found.mixes,
        ties={name: _bytes(p) for name, p in names.items() if name in shared},
        recomputable=block.recomputable,
        reads=block.reads,
        writes=block.writes,
    )
    after = {**env, **{name: tensor.detach() for name, tensor in written.items()}}
    grads = (wants - set(block.writes)) | {name for name, tensor in written.items() if tensor.requires_grad}
    return profile, after, grads


def _saving(saved: dict[int, int], own: set[int]) -> torch.autograd.graph.saved_tensors_hooks:
    def pack(tensor: Tensor) -> Tensor:
        key = _storage(tensor)
        if key not in own:
            saved[key] = tensor.untyped_storage().nbytes()
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _now(env: Mapping[str, Tensor]) -> float:
    device = next(iter(env.values())).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
