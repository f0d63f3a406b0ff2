"""Generating tokens with a program that is cut into stages: greedy and beam search.

The last stage feeds the first, and shapes grow, so no library schedule fits: plain sends from stage to
stage, and the rank of the last stage tells the others which tokens come next. Blocks that do not depend on
the tokens (an encoder, tables of its length) run once; what they leave stays on the stage that reads it.
With ``cache``, the others see only the new positions:

- a module with ``extend(cache, *reads)`` keeps what it needs of earlier positions (keys and values) in the
  dictionary ``cache``, as tensors with rows of samples in front or objects with ``reorder_cache(rows)``;
- a recomputable block is called with the new inputs: what it makes depends on nothing else;
- any other module must treat every position by itself. That is tried out on the prompt, not believed.

Without ``cache`` they run over all positions again for each token: the slow, obvious twin.

Shapes: B samples, W beams, R = B * W rows, T tokens so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeline import keyed, wire
from pipeline.beam import Beams
from pipeline.program import SAMPLE_ID, Block, nearest
from pipeline.runtime import Pipeline

NextInputs = Callable[[Tensor, int], dict[str, Tensor]]


@dataclass(frozen=True)
class Generated:
    """What was generated, the same on every rank of the pipeline.

    Attributes:
        tokens: (B, <= max_tokens) without the prompt; ``end`` where a sample has ended before others.
        score: (B,) sum of log-probabilities of the tokens, ``end`` included.
    """

    tokens: Tensor
    score: Tensor


def generate(
    pipeline: Pipeline,
    batch: Mapping[str, Tensor],
    *,
    prompt: Tensor,
    next_inputs: NextInputs,
    end: int,
    max_tokens: int,
    logits: str = "logits",
    num_beams: int = 1,
    length_penalty: float = 1.0,
    cache: bool = True,
) -> Generated:
    """Continue each sample's prompt by the likeliest tokens.

    Args:
        pipeline: over a program that leaves ``logits``; call ``program.eval()`` before. All its ranks call this.
        batch: batch inputs that do not depend on the tokens (at least those that this rank reads).
        prompt: (B, T) token ids to start from, the same on every rank; at least one a sample.
        next_inputs: called with all tokens so far (R, T) and how many of them are in the caches already (0
            without ``cache``); gives the batch inputs that depend on them, for the other T - past positions.
        logits: output (R, T - past, V) that the next token is chosen by: logits or log-probabilities.
        end: token that ends a sample.
        num_beams: W; 1 is greedy.
        length_penalty: a finished hypothesis counts ``score / tokens ** length_penalty``.

    Raises:
        ValueError: for a wrong argument, or with ``cache`` for a block that looks at other positions and has no
            ``extend``.
    """
    program = pipeline.program
    if logits not in program.outputs:
        raise ValueError(f"the program has no output {logits!r}{nearest(logits, program.outputs)}")
    if max_tokens < 1 or num_beams < 1:
        raise ValueError(f"max_tokens is {max_tokens} and num_beams {num_beams}; both must be at least 1")
    if prompt.dim() != 2 or not prompt.shape[1]:
        raise ValueError(f"prompt has shape {tuple(prompt.shape)}; it must be (samples, at least 1 token)")
    with torch.no_grad(), pipeline.watched(), keyed.scope(seed=0, step=0):
        return _Generation(pipeline, batch, next_inputs, logits=logits, cache=cache).run(
            prompt, Beams(end=end, width=num_beams, length_penalty=length_penalty), max_tokens=max_tokens
        )


Value = tuple[str, int]  # a name and the block that wrote it (-1: a batch input); a later block may write it anew


@dataclass
class _Stage:
    """What one stage keeps between tokens: tensors, each block's cache, and reads of blocks still to be tried."""

    first: int
    last: int
    env: dict[Value, Tensor]
    caches: dict[str, dict[str, Any]] = field(default_factory=dict)
    untried: dict[str, list[Tensor]] = field(default_factory=dict)


class _Generation:
    def __init__(
        self, pipeline: Pipeline, batch: Mapping[str, Tensor], next_inputs: NextInputs, *, logits: str, cache: bool
    ) -> None:
        self.pipeline, self.program, self.plan = pipeline, pipeline.program, pipeline.plan
        self.next_inputs, self.logits, self.cache = next_inputs, logits, cache
        inputs = {(name, -1): batch[name].detach() for name in pipeline.inputs_here if name in batch}
        bounds = self.plan.bounds()
        self.stages = {s: _Stage(*bounds[s], dict(inputs)) for s in pipeline.stages_here}
        self.moving: set[Value] = set()
        self.checked: set[str] = set()
        self.outbox = wire.Outbox()

    def _value(self, name: str, before: int) -> Value:
        """What a name stands for before block ``before``."""
        writers = [i for i, block in enumerate(self.program.blocks[:before]) if name in block.writes]
        return name, writers[-1] if writers else -1

    def _reads(self, block: Block) -> list[Value]:
        return [self._value(name, self.program.index(block.name)) for name in block.reads]

    def run(self, prompt: Tensor, beams: Beams, *, max_tokens: int) -> Generated:
        rows, tokens, past = prompt.shape[0], prompt, 0
        beams.start(rows, max_tokens=max_tokens)
        while True:
            given = self.next_inputs(tokens, past if self.cache else 0)
            if not self.moving:
                self._begin(given)
            scores = self._forward(given, first_pass=past == 0)
            chosen: dict[str, Tensor] | None = None
            if scores is not None:
                log_p_RV = scores[:, -1].double().log_softmax(-1)
                nothing = torch.zeros(0, dtype=torch.int64, device=log_p_RV.device)
                nan = {"token": nothing, "parent": nothing, "going_on": nothing.new_tensor([_NAN])}
                chosen = nan if bool(log_p_RV.isnan().any()) else beams.choose(log_p_RV)
            chosen = wire.broadcast(
                chosen, ("token", "parent", "going_on"), source=self.plan.last_rank,
                group=self.pipeline.group, device=self.pipeline.device,
            ) if self.pipeline.num_ranks > 1 else chosen  # fmt: skip
            assert chosen is not None
            past = tokens.shape[1]
            if chosen["going_on"].item() == _NAN:
                raise ValueError("the model gives NaN for the next token; look at its weights and inputs")
            if not chosen["going_on"].item():
                break
            self._reorder(chosen["parent"], rows=tokens.shape[0])
            tokens = torch.cat([tokens[chosen["parent"]], chosen["token"][:, None]], dim=1)
        self.outbox.wait()
        done = beams.result() if self.pipeline.has_last_stage else None
        if self.pipeline.num_ranks > 1:
            done = wire.broadcast(
                done, ("tokens", "score"), source=self.plan.last_rank,
                group=self.pipeline.group, device=self.pipeline.device,
            )  # fmt: skip
        assert done is not None
        return Generated(done["tokens"], done["score"])

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

    def _call(self, block: Block, stage: _Stage) -> None:
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
        self, block: Block, stage: _Stage, values: list[Value], reads: list[Tensor], result: list[Tensor]
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

    def _reorder(self, parent: Tensor, *, rows: int) -> None:
        """Let row i go on from what was row ``parent[i]``."""
        if parent.shape[0] == rows and torch.equal(parent, torch.arange(rows, device=parent.device)):
            return
        for stage in self.stages.values():
            for value, tensor in stage.env.items():
                if self.program.axis(value[0]) is not None and tensor.shape[0] % rows == 0:
                    stage.env[value] = _rows(tensor, parent, rows=rows)
            for name, reads in stage.untried.items():
                axes = [self.program.axis(read) for read in self.program.blocks[self.program.index(name)].reads]
                stage.untried[name] = [
                    tensor if axis is None else _rows(tensor, parent, rows=rows)
                    for tensor, axis in zip(reads, axes, strict=True)
                ]
            for kept in stage.caches.values():
                for key, value in kept.items():
                    if isinstance(value, Tensor):
                        kept[key] = _rows(value, parent, rows=rows)
                    else:
                        value.reorder_cache(parent)


_NAN = -1  # instead of whether it goes on, so that every rank stops
_MIXES = (
    "block {!r} cannot run on new positions alone: {}. "
    "Give its module extend(cache, *reads), or generate with cache=False"
)


def _listed(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _rows(tensor: Tensor, parent: Tensor, *, rows: int) -> Tensor:
    return tensor.unflatten(0, (rows, -1))[parent].flatten(0, 1)
