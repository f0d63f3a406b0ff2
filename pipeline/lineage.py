"""Whose rows move whose: found by experiment, because reading code cannot tell.

A block may be split into micro-batches only if a sample's rows move nothing but its own outputs. One
small perturbation misses ranks, capacity limits, saturated softmax, arg-max, clipping and mixing that
happens in the backward alone. So the batch is parted by each bit of the sample index, both sides in
turn are disturbed strongly (`pipeline.disturbance`), and the outputs of the untouched side must stay the
same bit for bit (or within what two undisturbed runs differ by). The ids by which keyed draws are made are
disturbed as well. Then the gradients (`pipeline.gradient_mixing`): of the untouched side's outputs, none may
reach the other side, and none may depend on it. Last, each half of the batch alone must give what it gives
within the batch, which shows what depends on the number of samples.

It costs some 24 log2(B) forwards and 10 log2(B) backwards of the block on the whole batch, once. It can miss
mixing that none of these disturbances triggers: the gradient comparison of `pipeline.verify` is the proof.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.disturbance import KINDS, Experiment, differ
from pipeline.gradient_mixing import mixes_in_backward
from pipeline.isolate import call, cut_off, unchanged_buffers
from pipeline.mixing_site import mixing_site
from pipeline.program import SAMPLE_ID, Block, BlockProgram
from pipeline.synchronised_norm import SynchronisedBatchNorm, norm_statistics

if TYPE_CHECKING:
    from pipeline.profile import Profile

_NUM_SINGLE_ROWS = 16


@dataclass(frozen=True)
class Lineage:
    """``kind``: ``sample`` (own rows only), ``group`` (a fixed part of the batch) or ``batch``.

    Attributes:
        stateful: a forward changes buffers.
        mixes: where and how rows of samples mix ("" if they do not).
        shared: tensors whose rows belong to no sample (unique documents: axis None or ``"microbatch"``) and move only
            the samples that use them. Such a ``group`` is no obstacle: every micro-batch is given all rows that it
            uses, and the gradients of a row add up.
        synchronised: nothing but synchronised norms mixes or changes buffers.
        changes: the buffers that a forward changes, by path, with the module's class.
    """

    kind: str
    stateful: bool
    mixes: str
    shared: tuple[str, ...] = ()
    synchronised: bool = False
    changes: tuple[str, ...] = ()


def classify(program: BlockProgram, block: Block, env: Mapping[str, Tensor], *, grads: set[str]) -> Lineage:
    """Lineage of one block, in the mode its module is in.

    A synchronised norm takes the statistics of the rows here, so that nothing is sent. Where there is one, the block is
    classified again with running statistics, which shows whether anything else mixes.

    Args:
        env: the tensors alive before the block, for a whole batch of at least 2 samples. Gradients and
            buffers are left as they were.
        grads: names that need gradients in training (floating-point inputs are all tested).

    Raises:
        ValueError: for a batch of one sample, or rows that do not fit the declared axis.
    """
    with norm_statistics("rank"):
        found = replace(_classify(program, block, env, grads=grads), changes=_changed_buffers(block, env))
    if not any(isinstance(part, SynchronisedBatchNorm) for part in block.module.modules()):
        return found
    with norm_statistics("running"):
        rest = _classify(program, block, env, grads=grads)
    return replace(found, synchronised=not rest.mixes and not rest.stateful)


def _classify(program: BlockProgram, block: Block, env: Mapping[str, Tensor], *, grads: set[str]) -> Lineage:
    num_samples = program.num_samples(env)
    if num_samples < 2:
        raise ValueError("cross-sample dependencies cannot be tested on a batch of 1 sample; use at least 2")
    stateful = bool(_changed_buffers(block, env))
    experiment = Experiment(program, block, env)
    samples = torch.arange(num_samples)
    for name, base in experiment.base.items():
        if program.has_samples(name) and (base.dim() == 0 or base.shape[0] % num_samples):
            raise ValueError(
                f"block {block.name!r} writes {name!r} of shape {tuple(base.shape)} for {num_samples} samples, but its "
                f"axis is {program.axis(name)!r}; give it one row (or k rows) a sample, or declare axis None"
            )
        scale = base.double().nan_to_num().abs().max().item() if base.numel() else 0.0
        if experiment.floor[name] > 1e-3 * max(scale, 1e-30):
            where = _where(experiment, {}, samples, generator_seed=1)
            return Lineage("batch", stateful, f"{where}: two runs on equal inputs differ in {name!r}; {_GENERATOR}")
    if experiment.draws:
        where = _where(experiment, {}, samples, generator_seed=1)
        return Lineage("batch", stateful, f"{where}: its forward moves torch's global generator; {_GENERATOR}")
    for bit in range((num_samples - 1).bit_length()):
        for side in (0, 1):
            touched, untouched = samples[samples >> bit & 1 == side], samples[samples >> bit & 1 != side]
            for kind in KINDS:
                changed = experiment.disturbed(kind, touched)
                name = experiment.moved(experiment.run(changed), untouched) if changed else ""
                if name:
                    where = _where(experiment, changed, untouched)
                    what = f"{where}: {kind} in other samples' inputs move {name!r}"
                    return Lineage(_group_or_batch(experiment), stateful, what)
            ids = experiment.other_ids(touched)
            name = "" if ids is None else experiment.moved(experiment.run({}, ids=ids), untouched)
            if name:
                return Lineage(
                    "batch", stateful, f"{_own(block)}: {_KEYED_ROWS} ({name!r} moves with other samples' ids)"
                )
            reason = mixes_in_backward(experiment, touched, untouched)
            if reason:
                return Lineage("batch", stateful, reason)
    reason = _differs_in_halves(experiment)
    if reason:
        return Lineage("batch", stateful, f"{_own(block)}: {reason}")
    shared = tuple(name for name in dict.fromkeys(block.reads) if _has_users(experiment, name))
    return Lineage("group" if shared else "sample", stateful, "", shared)


_GENERATOR = "it draws from generator state"
_KEYED_ROWS = "keyed draws of rows that are not samples follow the samples' ids"


def _where(experiment: Experiment, changed: Mapping[str, Tensor], untouched: Tensor, *, generator_seed: int = 0) -> str:
    def run(disturbed: bool) -> object:
        return experiment.run(changed, generator_seed=generator_seed) if disturbed else experiment.run({})

    block = experiment.block
    return mixing_site(block.name, block.module, run, untouched, experiment.num_samples)


def _own(block: Block) -> str:
    return f"{block.name} ({type(block.module).__name__})"


def _changed_buffers(block: Block, env: Mapping[str, Tensor]) -> tuple[str, ...]:
    """``block.path.buffer (Class)`` of what a forward changes."""
    before = {name: buffer.clone() for name, buffer in block.module.named_buffers()}
    with torch.no_grad(), unchanged_buffers(block.module):
        call(block, cut_off(block, env, set()), ids=env.get(SAMPLE_ID))
        after = dict(block.module.named_buffers())
        changed = [name for name, value in before.items() if differ(after[name], value, 0.0)]
    owners = (block.module.get_submodule(name.rpartition(".")[0]) for name in changed)
    return tuple(f"{block.name}.{name} ({type(owner).__name__})" for name, owner in zip(changed, owners, strict=True))


def _group_or_batch(experiment: Experiment) -> str:
    """``group`` if the samples fall into several parts that do not move each other."""
    n = experiment.num_samples
    part = list(range(n))
    moved_alone = False
    for i in range(n):
        for kind in KINDS:
            changed = experiment.disturbed(kind, torch.tensor([i]))
            if not changed:
                continue
            outputs = experiment.run(changed)
            for j in range(n):
                if i != j and experiment.moved(outputs, torch.tensor([j])):
                    moved_alone = True
                    part = [part[i] if p == part[j] else p for p in part]
    return "group" if moved_alone and len(set(part)) > 1 else "batch"


def _differs_in_halves(experiment: Experiment) -> str:
    """How the batch's halves alone differ from the batch, or an empty string."""
    samples, half = torch.arange(experiment.num_samples), experiment.num_samples // 2
    for part in (samples[:half], samples[half:]):
        try:
            name = experiment.differs_alone(part)
        except (RuntimeError, ValueError, IndexError) as error:
            first_line = str(error).strip().partition("\n")[0]
            return f"it fails on a part of the batch ({type(error).__name__}: {first_line})"
        if name:
            return f"{name!r} depends on how many samples the batch has"
    return ""


def within_microbatch(
    program: BlockProgram, block: Block, found: Lineage, *, whole: Mapping[str, Tensor], micro: Mapping[str, Tensor]
) -> Lineage:
    """``batch`` where what a block makes of the first micro-batch differs from what it makes of it within the batch.

    Rows of an axis ``"microbatch"`` are no samples, so nothing else shows whether they move each other (statistics over
    the documents of a micro-batch), or all samples of it (their mean). With one micro-batch there is nothing to see.

    Args:
        whole, micro: what the block wrote for the batch (or its first samples) and for its first micro-batch.
    """
    shared = [name for name in dict.fromkeys(block.reads) if program.axis(name) == "microbatch"]
    if found.mixes or not shared:
        return found
    for name in block.writes:
        if not whole[name].is_floating_point() or program.axis(name) is None:
            continue
        n = min(whole[name].shape[0], micro[name].shape[0])
        right, new = whole[name][:n], micro[name][:n]
        scale = right.double().nan_to_num().abs().max().item() if right.numel() else 0.0
        if new.shape != right.shape or differ(new, right, torch.finfo(right.dtype).eps ** 0.5 * scale):
            where = f"{_own(block)}: {name!r} of a micro-batch changes with the rows of {shared[0]!r} of the others"
            return Lineage("batch", found.stateful, where)
    return found


def _has_users(experiment: Experiment, name: str) -> bool:
    """Whether rows of a tensor without a sample axis move some samples and leave others alone."""
    tensor = experiment.env[name]
    if experiment.program.has_samples(name) or not tensor.is_floating_point():
        return False
    if tensor.dim() == 0 or tensor.shape[0] < 2:
        return False
    rows = torch.arange(tensor.shape[0])
    choices = [rows[rows >> bit & 1 == side] for bit in range((tensor.shape[0] - 1).bit_length()) for side in (0, 1)]
    choices += list(rows[:: -(-tensor.shape[0] // _NUM_SINGLE_ROWS)].split(1))
    samples = torch.arange(experiment.num_samples).split(1)
    for choice in choices:
        outputs = experiment.run(experiment.disturbed_rows(name, choice))
        moved = [bool(experiment.moved(outputs, sample)) for sample in samples]
        if any(moved) and not all(moved):
            return True
    return False


def require_sample_lineage(profile: Profile) -> None:
    """Refuse a program that micro-batches would turn into a different model.

    A ``group`` that comes from shared rows of a whole tensor (``shared``) passes.

    Raises:
        ValueError: for the first block that mixes samples or changes buffers, naming the submodule, what
            it mixes and what to do instead.
    """
    for block in profile.blocks:
        if block.lineage == "unknown":
            raise ValueError(f"block {block.name!r}: lineage was not traced; trace with lineage=True")
        if block.synchronised and profile.num_microbatches == 1:
            continue
        if block.lineage == "batch" or (block.lineage == "group" and block.mixes):
            whose = "its group" if block.lineage == "group" else "the whole batch"
            raise ValueError(
                f"block {block.name!r} mixes samples of {whose}, so micro-batches would change its gradients. "
                f"It mixes in {block.mixes}. {_remedy(block.mixes)}"
            )
        if block.stateful:
            raise ValueError(
                f"block {block.name!r} changes buffers in the forward ({', '.join(block.changes)}), so the result "
                "depends on how often and on which rows it runs. Remedies: (1) freeze that module (eval mode, or a "
                "constant in its place): the buffer stays what it is now. (2) Keep the state outside the pipeline and "
                "pass it in as a batch input without a sample axis."
            )


def _remedy(mixes: str) -> str:
    if "BatchNorm" in mixes:
        return (
            "Remedies: "
            "(1) Freeze the batch norm, pipeline.conversion.freeze_batch_norm(module): running statistics are used "
            "in training too, the function in eval mode stays what it is, batch statistics are no longer learned. "
            "(2) pipeline.conversion.batch_norm_to_group_norm(module, num_groups=...), or batch_norm_to_layer_norm: "
            "each sample is normalised by itself; affine weights are kept, but the function changes and has to be "
            "trained again. "
            "(3) Compute it once over the whole batch outside the pipeline and pass the result in as a batch input: "
            "the function stays what it is. "
            "(4) pipeline.conversion.synchronise_batch_norm(module, num_microbatches=1, group=...): statistics over "
            "the replicas of a stage, the function stays what it is, all weights kept; a step then has a single "
            "micro-batch, because statistics cannot be shared with micro-batches that have not run yet, and ranks wait "
            "for each other in every layer. (torch.nn.SyncBatchNorm is refused: convert it.)"
        )
    if _GENERATOR in mixes:
        return (
            "Remedy: keyed randomness, pipeline.keyed_modules.make_keyed(module), or pipeline.keyed.KeyedDropout "
            "(keyed.uniform) in its place."
        )
    if _KEYED_ROWS in mixes:
        return "Remedy: draw by the ids of those rows instead, `with pipeline.keyed.rows(document_ids)`."
    if "how many samples" in mixes or "fails on a part" in mixes:
        return (
            "Remedy: divide by a count over the global batch, given as a batch input, instead of the number of rows "
            "that happen to be there; and take sizes from the inputs."
        )
    return (
        "Remedies: (1) Compute it once over the whole batch outside the pipeline and pass the result in as a batch "
        "input: the function stays what it is (pipeline.hoist.Tower runs what comes before it there and back). "
        "(2) Rewrite it to look at one sample only, which is another function."
    )
