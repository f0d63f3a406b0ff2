"""A program over its stages, token by token: what each stage keeps between tokens, and what it sends.

The last stage feeds the first, and shapes grow, so no library schedule fits: plain sends from stage to stage. Blocks
that do not depend on the tokens (an encoder, tables of its length) run once; what they leave stays on the stage that
reads it. With ``cache``, the others see only the new positions:

- a module with ``extend(cache, *reads)`` keeps what it needs of earlier positions (keys and values) in the
  dictionary ``cache``, as tensors with rows of samples in front or objects with ``reorder_cache(rows)``;
- a recomputable block is called with the new inputs: what it makes depends on nothing else;
- any other module must treat every position by itself. That is tried out on the prompt, not believed.

Without ``cache`` they run over all positions again for each token: the slow, obvious twin.

Shapes: R rows, T tokens so far, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline import keyed, wire
from pipeline.program import SAMPLE_ID, Block, nearest
from pipeline.runtime import Pipeline

NextInputs = Callable[[Tensor, int], dict[str, Tensor]]
Value = tuple[str, int]  # a name and the block that wrote it (-1: a batch input); a later block may write it anew


@dataclass
class Kept:
    """What one stage keeps between tokens: tensors, each block's cache, and reads of blocks still to be tried."""

    first: int
    last: int
    env: dict[Value, Tensor]
    caches: dict[str, dict[str, Any]] = field(default_factory=dict)
    untried: dict[str, list[Tensor]] = field(default_factory=dict)

    def copied(self) -> Kept:
        """As it is now: what is done to either leaves the other alone (tensors in caches are only ever replaced)."""
        caches = {
            block: {key: value if isinstance(value, Tensor) else copy.deepcopy(value) for key, value in kept.items()}
            for block, kept in self.caches.items()
        }
        return replace(self, env=dict(self.env), caches=caches, untried=dict(self.untried))


class Decoding:
    """One batch on the stages of this rank; every rank of the pipeline makes the same calls in the same order.

    Args:
        batch: batch inputs that do not depend on the tokens (at least those that this rank reads).
        next_inputs, logits, cache: see `pipeline.generate.generate`.

    Attributes:
        stages: what is kept, by stage.

    Raises:
        ValueError: if the program has no such output.
    """

    def __init__(
        self, pipeline: Pipeline, batch: Mapping[str, Tensor], next_inputs: NextInputs, *, logits: str, cache: bool
    ) -> None:
        self.pipeline, self.program, self.plan = pipeline, pipeline.program, pipeline.plan
        if logits not in self.program.outputs:
            raise ValueError(f"the program has no output {logits!r}{nearest(logits, self.program.outputs)}")
        self.next_inputs, self.logits, self.cache = next_inputs, logits, cache
        inputs = {(name, -1): batch[name].detach() for name in pipeline.inputs_here if name in batch}
        bounds = self.plan.bounds()
        self.stages = {s: Kept(*bounds[s], dict(inputs)) for s in pipeline.stages_here}
        self._block_reads: dict[str, list[Value]] = {}
        writer: dict[str, int] = {}
        for i, block in enumerate(self.program.blocks):
            self._block_reads[block.name] = [(name, writer.get(name, -1)) for name in block.reads]
            writer |= dict.fromkeys(block.writes, i)
        self.moving: set[Value] = set()
        self.checked: set[str] = set()
        self.outbox = wire.Outbox()

    def next_scores(self, tokens: Tensor, past: int) -> Tensor | None:
        """The output ``logits`` (R, T - past, V) for the tokens (R, T), on the rank of the last stage.

        Args:
            past: how many of them are in the caches.

        Raises:
            ValueError: if inputs are missing, or a block cannot run on new positions alone.
        """
        given = self.next_inputs(tokens, past if self.cache else 0)
        if not self.moving:
            self._begin(given)
        return self._forward(given, first_pass=past == 0)

    def from_last_rank(self, tensors: dict[str, Tensor] | None, names: tuple[str, ...]) -> dict[str, Tensor]:
        """What the rank of the last stage has, everywhere."""
        if self.pipeline.num_ranks == 1:
            assert tensors is not None
            return tensors
        return wire.broadcast(
            tensors, names, source=self.plan.last_rank, group=self.pipeline.group, device=self.pipeline.device
        )

    def numbers_from_last_rank(self, numbers: Tensor | None, count: int) -> Tensor:
        """So many whole numbers that the rank of the last stage has, everywhere, in one message."""
        if numbers is None:
            numbers = torch.empty(count, dtype=torch.int64, device=self.pipeline.device)
        assert numbers.shape == (count,) and numbers.dtype == torch.int64
        if self.pipeline.num_ranks > 1:
            dist.broadcast(numbers, group=self.pipeline.group, group_src=self.plan.last_rank)
        return numbers

    def reorder(self, parent: Tensor, *, rows: int) -> None:
        """Let row i go on from what was row ``parent[i]``; there may be more or fewer rows than the ``rows`` before.

        Where all go on from the same row, nothing is copied.
        """
        if parent.shape[0] == rows and torch.equal(parent, torch.arange(rows, device=parent.device)):
            return
        one = int(parent[0]) if bool((parent == parent[0]).all()) else None
        for stage in self.stages.values():
            needed = self._needed(stage)
            for value, tensor in stage.env.items():
                if value in needed and self.program.has_samples(value[0]) and tensor.shape[0] % rows == 0:
                    stage.env[value] = _rows(tensor, parent, rows=rows, one=one)
            for name, reads in stage.untried.items():
                names = self.program.blocks[self.program.index(name)].reads
                stage.untried[name] = [
                    _rows(tensor, parent, rows=rows, one=one) if self.program.has_samples(read) else tensor
                    for tensor, read in zip(reads, names, strict=True)
                ]
            for kept in stage.caches.values():
                for key, value in kept.items():
                    if isinstance(value, Tensor):
                        kept[key] = _rows(value, parent, rows=rows, one=one)
                    else:
                        value.reorder_cache(parent)

    def _needed(self, stage: Kept) -> set[Value]:
        """What blocks that run again read: the rest may keep the rows it had."""
        again = (
            *self.program.rerun(stage.first, stage.last, recomputed=self.plan.recomputed),
            *self.program.blocks[stage.first : stage.last],
        )
        reads = [set(self._reads(block)) for block in again]
        return {value for values in reads if self.moving & values for value in values}

    def _value(self, name: str, before: int) -> Value:
        """What a name stands for before block ``before``."""
        writers = [i for i, block in enumerate(self.program.blocks[:before]) if name in block.writes]
        return name, writers[-1] if writers else -1

    def _reads(self, block: Block) -> list[Value]:
        return self._block_reads[block.name]

    def _begin(self, given: Mapping[str, Tensor]) -> None:
        """Find what depends on the tokens, and that nothing is missing."""
        for name in given:
            if name not in self.program.inputs:
                raise ValueError(
                    f"next_inputs gives {name!r}, which is no batch input{nearest(name, self.program.inputs)}"
                )
        self.moving = {(name, -1) for name in given}
        for i, block in enumerate(self.program.blocks):
            if self.moving & set(self._reads(block)):
                self.moving |= {(name, i) for name in block.writes}
        if self._value(self.logits, len(self.program.blocks)) not in self.moving:
            raise ValueError(f"output {self.logits!r} does not depend on what next_inputs gives: {', '.join(given)}")
        for name in self.pipeline.inputs_here:
            if name not in given and any((name, -1) not in stage.env for stage in self.stages.values()):
                raise ValueError(f"neither the batch nor next_inputs gives input {name!r}")

    def _forward(self, given: Mapping[str, Tensor], *, first_pass: bool) -> Tensor | None:
        """Logits, on the rank of the last stage."""
        count, result = self.plan.num_ranks, None
        for s, stage in self.stages.items():
            stage.env |= {(name, -1): tensor for name, tensor in given.items() if name in self.pipeline.inputs_here}
            if s:
                names = self._crossing(stage.first, first_pass=first_pass)
                values = wire.receive(
                    len(names), source=(s - 1) % count, group=self.pipeline.group, device=self.pipeline.device
                )
                stage.env |= dict(zip(names, values, strict=True))
            recomputed = self.plan.recomputed
            again = self.program.rerun(stage.first, stage.last, recomputed=recomputed)
            for block in (*again, *self.program.blocks[stage.first : stage.last]):
                if first_pass or self.moving & set(self._reads(block)):
                    self._call(block, stage)
            if s + 1 < self.plan.num_stages:
                names = self._crossing(stage.last, first_pass=first_pass)
                self.outbox.send([stage.env[n] for n in names], to=(s + 1) % count, group=self.pipeline.group)
            else:
                result = stage.env[self._value(self.logits, len(self.program.blocks))]
        return result

    def _crossing(self, cut: int, *, first_pass: bool) -> list[Value]:
        values = [self._value(name, cut) for name in self.program.carry(cut, recomputed=self.plan.recomputed)]
        return values if first_pass else [value for value in values if value in self.moving]

    def _call(self, block: Block, stage: Kept) -> None:
        values = self._reads(block)
        reads = [stage.env[value] for value in values]
        moves = bool(self.moving & set(values))
        extend = getattr(block.module, "extend", None)
        with keyed.block(block.name, ids=stage.env.get((SAMPLE_ID, -1))):
            if self.cache and moves and extend is not None:
                result = extend(stage.caches.setdefault(block.name, {}), *reads)
            else:
                result = block.module(*reads)
                if self.cache and moves and not block.recomputable and block.name not in self.checked:
                    self._check_positions(block, stage, values, reads, _listed(result))
        index = self.program.index(block.name)
        stage.env |= {(name, index): tensor for name, tensor in zip(block.writes, _listed(result), strict=True)}

    def _check_positions(
        self, block: Block, stage: Kept, values: list[Value], reads: list[Tensor], result: list[Tensor]
    ) -> None:
        """Refuse a block that looks at earlier positions: it gives something else where they are left out.

        A prompt of one token shows nothing; then the second token is looked at, with the first before it.
        """
        grows = [value in self.moving and tensor.dim() > 1 for value, tensor in zip(values, reads, strict=True)]
        earlier = stage.untried.pop(block.name, None)
        length = next((tensor.shape[1] for tensor, g in zip(reads, grows, strict=True) if g), 1)
        if earlier is None and length == 1:
            stage.untried[block.name] = reads
            return
        self.checked.add(block.name)
        try:
            if earlier is None:
                with_earlier = [tensor[:, -1:] for tensor in result]
                alone = _listed(block.module(*[t[:, -1:] if g else t for t, g in zip(reads, grows, strict=True)]))
            else:
                both = [torch.cat([e, t], dim=1) if g else t for e, t, g in zip(earlier, reads, grows, strict=True)]
                with_earlier = [tensor[:, -1:] for tensor in _listed(block.module(*both))]
                alone = [tensor[:, -1:] for tensor in result]
        except (RuntimeError, IndexError) as error:
            raise ValueError(_MIXES.format(block.name, f"it fails on fewer positions: {error}")) from error
        for right, found in zip(with_earlier, alone, strict=True):
            scale = right.double().abs().max().item() if right.numel() else 0.0
            if found.shape != right.shape or (found.double() - right.double()).abs().max() > 1e-4 * max(scale, 1e-30):
                raise ValueError(_MIXES.format(block.name, "its result for a position changes with those before it"))


_MIXES = (
    "block {!r} cannot run on new positions alone: {}. "
    "Give its module extend(cache, *reads), or generate with cache=False"
)


def _listed(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _rows(tensor: Tensor, parent: Tensor, *, rows: int, one: int | None) -> Tensor:
    """Rows of samples (or their adjacent pairs) by parent; a view if ``one`` is the parent of all."""
    by_sample = tensor.unflatten(0, (rows, -1))
    if one is not None and by_sample.shape[1] == 1:
        return by_sample[one].expand(parent.shape[0], *tensor.shape[1:])
    return by_sample[parent].flatten(0, 1)
