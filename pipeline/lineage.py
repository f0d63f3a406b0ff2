"""Whose rows move whose: found by experiment, because reading code cannot tell.

A block may be split into micro-batches only if a sample's rows move nothing but its own outputs. One
small perturbation misses ranks, capacity limits, saturated softmax, arg-max, clipping and mixing that
happens in the backward alone. So the batch is parted by each bit of the sample index, both sides in
turn are disturbed strongly (noise, huge constants, other samples' rows, NaN), and the outputs of the
untouched side must stay the same bit for bit (or within what two undisturbed runs differ by). Then the
gradients: of the untouched side's outputs, none may reach the other side, and none may depend on it.

It costs some 14 log2(B) forwards of the block on the whole batch, once. It can still miss mixing that
none of these disturbances triggers: the gradient comparison of `pipeline.verify` is the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipeline.isolate import call, cut_off, unchanged_buffers
from pipeline.program import SAMPLE_ID, Block, BlockProgram

if TYPE_CHECKING:
    from pipeline.trace import Profile


@dataclass(frozen=True)
class Lineage:
    """``kind``: ``sample`` (own rows only), ``group`` (rows of a fixed group) or ``batch``.

    ``mixes`` says where and how ("" if rows do not mix); ``stateful``: a forward changes buffers.
    """

    kind: str
    stateful: bool
    mixes: str


_Disturb = Callable[[Tensor, Tensor], Tensor]  # (rows of the whole batch, index of rows to change) -> new


def _roll(x: Tensor, rows: Tensor) -> Tensor:
    return x.roll(max(1, x.shape[0] // 2), 0)[rows]


def _same(x: Tensor, rows: Tensor) -> Tensor:
    return x[rows[:1]].expand_as(x[rows])


def _noise(x: Tensor, rows: Tensor) -> Tensor:
    g = torch.Generator().manual_seed(1)
    draw = torch.randn(x[rows].shape, generator=g).to(x.device, x.dtype)
    return x[rows] + 30.0 * draw * x.nan_to_num().abs().max().clamp(min=1.0)


def _constant(value: float) -> _Disturb:
    return lambda x, rows: torch.full_like(x[rows], value)


# Those of the first kind change every input, the others floating-point inputs only.
_EVERY: dict[str, _Disturb] = {"rows of other samples": _roll, "copies of one row": _same}
_FLOAT: dict[str, _Disturb] = {
    "large noise": _noise,
    "large values": _constant(1e3),
    "large negative values": _constant(-1e3),
    "NaN": _constant(float("nan")),
}


class _Experiment:
    def __init__(self, program: BlockProgram, block: Block, env: Mapping[str, Tensor]) -> None:
        self.program, self.block, self.env = program, block, env
        self.ids = env.get(SAMPLE_ID)
        self.num_samples = program.num_samples(env)
        self.base = self.run({})
        again = self.run({}, generator_seed=1)
        self.floor = {
            name: (value.double() - again[name].double()).nan_to_num().abs().max().item() if value.numel() else 0.0
            for name, value in self.base.items()
        }

    def run(self, changed: Mapping[str, Tensor], *, generator_seed: int = 0) -> dict[str, Tensor]:
        with torch.no_grad(), unchanged_buffers(self.block.module):
            torch.manual_seed(generator_seed)  # the generators are put back afterwards
            inputs = cut_off(self.block, {**self.env, **changed}, set())
            return {name: tensor.clone() for name, tensor in call(self.block, inputs, ids=self.ids).items()}

    def rows(self, tensor: Tensor, samples: Tensor) -> Tensor:
        """Indices of the rows that belong to some samples."""
        k = tensor.shape[0] // self.num_samples
        return (samples[:, None] * k + torch.arange(k)).reshape(-1).to(tensor.device)

    def disturbed(self, kind: str, samples: Tensor) -> dict[str, Tensor]:
        changed = {}
        for name in dict.fromkeys(self.block.reads):
            tensor = self.env[name]
            if self.program.axis(name) is None or (kind in _FLOAT and not tensor.is_floating_point()):
                continue
            changed[name] = tensor.clone()
            rows = self.rows(tensor, samples)
            changed[name][rows] = (_EVERY.get(kind) or _FLOAT[kind])(tensor, rows)
        return changed

    def moved(self, outputs: Mapping[str, Tensor], untouched: Tensor) -> str:
        """Name of an output that moved in the untouched samples, or an empty string."""
        for name, base in self.base.items():
            new = outputs[name]
            if new.shape != base.shape:
                return name
            if self.program.axis(name) is not None:
                rows = self.rows(base, untouched)
                new, base = new[rows], base[rows]
            if _differ(new, base, self.floor[name]):
                return name
        return ""


def classify(program: BlockProgram, block: Block, env: Mapping[str, Tensor], *, grads: set[str]) -> Lineage:
    """Lineage of one block, in the mode its module is in.

    Args:
        env: the tensors alive before the block, for a whole batch of at least 2 samples. Gradients and
            buffers are left as they were.
        grads: names that need gradients in training (floating-point inputs are all tested).

    Raises:
        ValueError: for a batch of one sample, or rows that do not fit the declared axis.
    """
    num_samples = program.num_samples(env)
    if num_samples < 2:
        raise ValueError("cross-sample dependencies cannot be tested on a batch of 1 sample; use at least 2")
    stateful = _is_stateful(block, env)
    experiment = _Experiment(program, block, env)
    for name, base in experiment.base.items():
        if program.axis(name) is not None and (base.dim() == 0 or base.shape[0] % num_samples):
            raise ValueError(
                f"block {block.name!r} writes {name!r} of shape {tuple(base.shape)} "
                f"for {num_samples} samples, but its "
                f"axis is {program.axis(name)!r}; give it one row (or k rows) a sample, or declare axis None"
            )
        scale = base.double().nan_to_num().abs().max().item() if base.numel() else 0.0
        if experiment.floor[name] > 1e-3 * max(scale, 1e-30):
            return Lineage("batch", stateful, "two runs on equal inputs differ: it draws from generator state")
    samples = torch.arange(num_samples)
    for bit in range((num_samples - 1).bit_length()):
        for side in (0, 1):
            touched, untouched = samples[samples >> bit & 1 == side], samples[samples >> bit & 1 != side]
            for kind in (*_EVERY, *_FLOAT):
                changed = experiment.disturbed(kind, touched)
                name = experiment.moved(experiment.run(changed), untouched) if changed else ""
                if name:
                    where = _innermost(experiment, changed, untouched)
                    what = f"{where}: {kind} in other samples move {name!r}"
                    return Lineage(_group_or_batch(experiment), stateful, what)
            reason = _mixes_in_backward(experiment, touched, untouched)
            if reason:
                return Lineage("batch", stateful, f"{_describe(block.module, '')}: {reason}")
    return Lineage("sample", stateful, "")


def _is_stateful(block: Block, env: Mapping[str, Tensor]) -> bool:
    before = {name: buffer.clone() for name, buffer in block.module.named_buffers()}
    with torch.no_grad(), unchanged_buffers(block.module):
        call(block, cut_off(block, env, set()), ids=env.get(SAMPLE_ID))
        after = dict(block.module.named_buffers())
        return any(_differ(after[name], value, 0.0) for name, value in before.items())


def _differ(new: Tensor, old: Tensor, floor: float) -> bool:
    same = (new == old) | ((new != new) & (old != old))
    if bool(same.all()):
        return False
    if floor == 0.0:
        return True
    difference = (new.double() - old.double()).abs()[~same]
    return not bool((difference <= 2 * floor).all())  # NaN differs


def _group_or_batch(experiment: _Experiment) -> str:
    """``group`` if every sample is moved by exactly the members of a proper part of the batch."""
    n = experiment.num_samples
    moves = torch.eye(n, dtype=torch.bool)
    for i in range(n):
        for kind in (*_EVERY, *_FLOAT):
            changed = experiment.disturbed(kind, torch.tensor([i]))
            if not changed:
                continue
            outputs = experiment.run(changed)
            for j in range(n):
                if not moves[i, j] and experiment.moved(outputs, torch.tensor([j])):
                    moves[i, j] = True
    closed = (moves.float() @ moves.float() > 0) == moves
    is_partition = bool(closed.all()) and bool((moves == moves.T).all())
    return "group" if is_partition and not bool(moves.all()) and not bool(moves.eq(torch.eye(n)).all()) else "batch"


def _mixes_in_backward(experiment: _Experiment, touched: Tensor, untouched: Tensor) -> str:
    """How gradients mix, or an empty string.

    Three runs: weights on the untouched side's outputs only; on both sides' outputs; and on the
    untouched side's with the other side's inputs disturbed.
    """
    block, env, program = experiment.block, experiment.env, experiment.program
    floats = {n for n in block.reads if env[n].is_floating_point() and program.axis(n) is not None}
    parameters = [p for p in block.module.parameters() if p.requires_grad]

    def gradients(changed: Mapping[str, Tensor], both: bool) -> tuple[dict[str, Tensor], list[Tensor | None]]:
        with unchanged_buffers(block.module), torch.enable_grad():
            inputs = cut_off(block, {**env, **changed}, floats)
            outputs = call(block, inputs, ids=experiment.ids)
            g = torch.Generator().manual_seed(2)
            roots, weights = [], []
            for name, tensor in outputs.items():
                weight = torch.rand(tensor.shape, generator=g).to(tensor.device) + 0.5
                if not tensor.requires_grad or program.axis(name) is None:
                    continue
                if not both:
                    weight[experiment.rows(tensor, touched)] = 0.0
                roots.append(tensor)
                weights.append(weight.to(tensor.dtype))
            names = sorted(floats)
            if not roots or not (names or parameters):
                return {}, []
            wanted = [inputs[n] for n in names] + parameters
            found = torch.autograd.grad(roots, wanted, weights, allow_unused=True)
            return (
                {n: g_ for n, g_ in zip(names, found, strict=False) if g_ is not None},
                list(found[len(names) :]),
            )

    alone, of_parameters = gradients({}, False)
    for name, grad in alone.items():
        if bool((grad[experiment.rows(grad, touched)] != 0).any()):
            return f"in the backward, gradients of one sample's outputs reach {name!r} of other samples"

    def own_rows(grads: dict[str, Tensor], what: str) -> str:
        for name, grad in alone.items():
            rows = experiment.rows(grad, untouched)
            right = grad[rows]
            scale = right.double().nan_to_num().abs().max().item() if right.numel() else 0.0
            if name not in grads or _differ(grads[name][rows], right, 1e-5 * scale):
                return f"in the backward, {what} of other samples change the gradient of {name!r}"
        return ""

    reason = own_rows(gradients({}, True)[0], "output gradients")
    for kind in ("rows of other samples", "large noise", "NaN"):
        changed = experiment.disturbed(kind, touched)
        if not changed or reason:
            break
        grads, theirs = gradients(changed, False)
        reason = own_rows(grads, f"values ({kind})")
        if reason or kind == "NaN":  # 0 * NaN is NaN in a parameter's gradient, by right
            continue
        for new, old in zip(theirs, of_parameters, strict=True):
            if new is not None and old is not None and kind == "rows of other samples":
                scale = old.double().nan_to_num().abs().max().item()
                if _differ(new, old, 1e-4 * scale):
                    reason = f"in the backward, values ({kind}) of other samples change a parameter's gradient"
    return reason


def _innermost(experiment: _Experiment, changed: Mapping[str, Tensor], untouched: Tensor) -> str:
    """The innermost submodule whose outputs move although its inputs do not."""
    module = experiment.block.module

    def record(env: Mapping[str, Tensor]) -> list[tuple[str, nn.Module, list[Tensor], list[Tensor]]]:
        calls: list[tuple[str, nn.Module, list[Tensor], list[Tensor]]] = []
        entered: list[list[Tensor]] = []

        def enter(_: nn.Module, args: Any) -> None:
            entered.append(_tensors(args))

        def leave(name: str) -> Callable[..., None]:
            return lambda part, _, result: calls.append((name, part, entered.pop(), _tensors(result)))

        handles = []
        for name, part in module.named_modules():
            handles += [part.register_forward_pre_hook(enter), part.register_forward_hook(leave(name))]
        try:
            experiment.run(env)
        finally:
            for handle in handles:
                handle.remove()
        return calls

    def differ(new: list[Tensor], old: list[Tensor]) -> bool:
        for a, b in zip(new, old, strict=False):
            if a.shape != b.shape:
                return True
            if b.dim() and b.shape[0] % experiment.num_samples == 0 and b.shape[0]:
                a, b = a[experiment.rows(a, untouched)], b[experiment.rows(b, untouched)]
            if _differ(a, b, 0.0):
                return True
        return False

    for (name, part, in_old, out_old), (_, _, in_new, out_new) in zip(record({}), record(changed), strict=False):
        if differ(out_new, out_old) and not differ(in_new, in_old):
            return _describe(part, name)
    return _describe(module, "")


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, tuple | list) else (value,)
    return [v.detach().clone() for v in values if isinstance(v, Tensor)]


def _describe(part: nn.Module, path: str) -> str:
    return f"{path or 'the block itself'} ({type(part).__name__})"


def require_sample_lineage(profile: Profile) -> None:
    """Refuse a program that micro-batches would turn into a different model.

    Raises:
        ValueError: for the first block that mixes samples or changes buffers, naming the submodule, what
            it mixes and what to do instead.
    """
    for block in profile.blocks:
        if block.lineage == "unknown":
            raise ValueError(f"block {block.name!r}: lineage was not traced; trace with lineage=True")
        if block.lineage != "sample":
            whose = "its group" if block.lineage == "group" else "the whole batch"
            raise ValueError(
                f"block {block.name!r} mixes samples of {whose}, so "
                "micro-batches would change its gradients. "
                f"It mixes in {block.mixes}. {_remedy(block.mixes)}"
            )
        if block.stateful:
            raise ValueError(
                f"block {block.name!r} changes its buffers in the forward, so "
                "the result depends on how often and "
                "on which rows it runs. Freeze it (eval mode), or keep the state outside the pipeline."
            )


def _remedy(mixes: str) -> str:
    if "BatchNorm" in mixes:
        return "Freeze the batch norm (eval mode), or replace it with layer or group norm."
    if "generator state" in mixes:
        return "Use pipeline.keyed.KeyedDropout (or keyed.uniform) in its place."
    return (
        "Compute it once over the whole batch outside the pipeline and pass the result in as a batch input, "
        "rewrite it to look at one sample only, or train with one micro-batch and one stage."
    )
