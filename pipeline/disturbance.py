"""One block on a whole batch, run again with the inputs of some samples disturbed.

Disturbances are large and of several kinds, because mixing hides: ranks and arg-max need another order,
capacities other choices, clipping large values, saturated softmax the replacement of whole rows, masks
and ids values of their own kind. NaN shows what is multiplied by zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pipeline.isolate import call, cut_off, generator_states, unchanged_buffers
from pipeline.program import SAMPLE_ID, Block, BlockProgram

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
_EVERY: dict[str, _Disturb] = {"swapped rows": _roll, "copies of one row": _same}
_FLOAT: dict[str, _Disturb] = {
    "large noise": _noise,
    "large values": _constant(1e3),
    "large negative values": _constant(-1e3),
    "NaN": _constant(float("nan")),
}
KINDS = (*_EVERY, *_FLOAT)


class Experiment:
    """A block, the tensors before it, and what it writes undisturbed (``base``).

    Attributes:
        draws: whether a forward moves the state of torch's global generators.
        floor: by output, how far two undisturbed runs differ (0 where a block is deterministic).
    """

    def __init__(self, program: BlockProgram, block: Block, env: Mapping[str, Tensor]) -> None:
        self.program, self.block, self.env = program, block, env
        self.ids = env.get(SAMPLE_ID)
        self.num_samples = program.num_samples(env)
        self.draws = False
        self.base = self.run({})
        again = self.run({}, generator_seed=1)
        self.floor = {
            name: (value.double() - again[name].double()).nan_to_num().abs().max().item() if value.numel() else 0.0
            for name, value in self.base.items()
        }

    def run(
        self, changed: Mapping[str, Tensor], *, ids: Tensor | None = None, generator_seed: int = 0
    ) -> dict[str, Tensor]:
        """What the block writes with some inputs (or the ids that keyed draws use) replaced."""
        with torch.no_grad(), unchanged_buffers(self.block.module):
            torch.manual_seed(generator_seed)  # the generators are put back afterwards
            inputs = cut_off(self.block, {**self.env, **changed}, set())
            before = generator_states(self.block.module, inputs)
            written = call(self.block, inputs, ids=self.ids if ids is None else ids)
            after = generator_states(self.block.module, inputs)
            self.draws |= not all(map(torch.equal, before, after))
            return {name: tensor.clone() for name, tensor in written.items()}

    def rows(self, tensor: Tensor, samples: Tensor) -> Tensor:
        """Indices of the rows that belong to some samples."""
        k = tensor.shape[0] // self.num_samples
        return (samples[:, None] * k + torch.arange(k)).reshape(-1).to(tensor.device)

    def disturbed(self, kind: str, samples: Tensor) -> dict[str, Tensor]:
        """The block's inputs that have samples, those of ``samples`` disturbed (one of `KINDS`)."""
        changed = {}
        for name in dict.fromkeys(self.block.reads):
            tensor = self.env[name]
            if not self.program.has_samples(name) or (kind in _FLOAT and not tensor.is_floating_point()):
                continue
            changed[name] = tensor.clone()
            rows = self.rows(tensor, samples)
            changed[name][rows] = (_EVERY.get(kind) or _FLOAT[kind])(tensor, rows)
        return changed

    def disturbed_rows(self, name: str, rows: Tensor) -> dict[str, Tensor]:
        """One input, some of its rows replaced by large noise."""
        changed = self.env[name].clone()
        changed[rows] = _noise(self.env[name], rows)
        return {name: changed}

    def other_ids(self, samples: Tensor) -> Tensor | None:
        """Sample ids with those of ``samples`` replaced."""
        if self.ids is None:
            return None
        ids = self.ids.clone()
        ids[samples] += 1_000_003
        return ids

    def moved(self, outputs: Mapping[str, Tensor], untouched: Tensor) -> str:
        """Name of an output that moved in the untouched samples, or an empty string."""
        for name, base in self.base.items():
            new = outputs[name]
            if new.shape != base.shape:
                return name
            if self.program.has_samples(name):
                rows = self.rows(base, untouched)
                new, base = new[rows], base[rows]
            if differ(new, base, self.floor[name]):
                return name
        return ""

    def differs_alone(self, samples: Tensor) -> str:
        """Which output changes when these samples are the whole batch, as a micro-batch would be; or "".

        Floating-point outputs only, within sqrt(eps) of their largest value: other shapes are summed in
        another order, so bits may change, and ties may fall the other way.
        """
        part = {
            name: self.env[name]
            if not self.program.has_samples(name)
            else self.env[name][self.rows(self.env[name], samples)]
            for name in self.block.reads
        }
        ids = None if self.ids is None else self.ids[samples]
        with torch.no_grad(), unchanged_buffers(self.block.module):
            torch.manual_seed(0)
            outputs = call(self.block, cut_off(self.block, part, set()), ids=ids)
        for name, whole in self.base.items():
            right = whole if not self.program.has_samples(name) else whole[self.rows(whole, samples)]
            new = outputs[name]
            if new.shape != right.shape:
                return name
            if not right.is_floating_point() or not right.numel():
                continue
            scale = whole.double().nan_to_num().abs().max().item()
            if differ(new, right, max(self.floor[name], torch.finfo(right.dtype).eps ** 0.5 * scale)):
                return name
        return ""


def differ(new: Tensor, old: Tensor, floor: float) -> bool:
    """Whether two tensors differ: bit for bit (NaN equals NaN), or by more than twice a floor above 0."""
    same = (new == old) | ((new != new) & (old != old))
    if bool(same.all()):
        return False
    if floor == 0.0:
        return True
    difference = (new.double() - old.double()).abs()[~same]
    return not bool((difference <= 2 * floor).all())  # NaN differs
