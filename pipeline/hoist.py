"""What mixes the whole batch is computed outside the pipeline; this is the way there and back.

A loss over all samples (contrastive, or anything else of lineage ``batch``) cannot be computed by
micro-batch. So the program before it runs forward without graph over all rows; the loss is computed once on
its outputs, the same on every rank, and leaves gradients on them; then the program runs again, with graph,
micro-batch by micro-batch, and receives those gradients. The price is the second forward, as in gradient
caching (2101.06983); nothing is approximated. A tower of a retriever that is too large for one device runs
this way in a pipeline of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.padding import pad_batch
from pipeline.plan_file import Plan
from pipeline.program import Block, BlockProgram, nearest
from pipeline.runtime import LOSSES, Pipeline

PULL = "pull"
GRADIENT = "gradient_of_"


class _Pull(nn.Module):
    """Losses whose gradient on each output is the one that is given."""

    def forward(self, *outputs_and_gradients: Tensor) -> Tensor:
        half = len(outputs_and_gradients) // 2
        pairs = zip(outputs_and_gradients[:half], outputs_and_gradients[half:], strict=True)
        return torch.stack([(output * gradient).flatten(1).sum(1) for output, gradient in pairs], dim=1)


class Tower:
    """A program over rows, cut into stages: outputs first, their gradients later.

    Args:
        program: its outputs are floating point with a sample axis, shape (N, ...) of at least two dimensions.
        plan: of this program's blocks.
        group: the ranks, in order (None: all).
        timeout_s: longest wait for another rank.

    Attributes:
        pipeline: for its ``parameters_here``, ``owned``, ``inputs_here``, ``check_ties`` and
            ``release_other_stages``.

    Raises:
        ValueError: if the program has ``losses`` or an output without a sample axis.
    """

    def __init__(
        self, program: BlockProgram, plan: Plan, *, group: dist.ProcessGroup | None = None, timeout_s: float = 300.0
    ) -> None:
        for name in program.outputs:
            if name == LOSSES or program.axis(name) != "sample":
                raise ValueError(f"output {name!r} of a tower must be an output by sample, and none called {LOSSES!r}")
        self.program = program
        self._forward = Pipeline(program, plan, group=group, timeout_s=timeout_s)
        gradients = tuple(f"{GRADIENT}{name}" for name in program.outputs)
        pulled = BlockProgram(
            [*program.blocks, Block(PULL, _Pull(), (*program.outputs, *gradients), (LOSSES,))],
            inputs=(*program.inputs, *gradients),
            outputs=(LOSSES,),
            axes=program.axes,
        )
        *first, last = plan.stages
        longer = replace(plan, stages=(*first, replace(last, blocks=(*last.blocks, PULL))))
        self.pipeline = Pipeline(pulled, longer, group=group, timeout_s=timeout_s)

    def embed(self, batch: Mapping[str, Tensor], *, seed: int, step: int) -> dict[str, Tensor]:
        """The outputs for all N rows, without graph, on every rank (collective)."""
        padded, num_rows = self._padded(self.program, batch, weights=())
        outputs = self._forward.forward(padded, seed=seed, step=step).outputs_everywhere()
        return {name: tensor[:num_rows] for name, tensor in outputs.items()}

    def backward(self, batch: Mapping[str, Tensor], gradients: Mapping[str, Tensor], *, seed: int, step: int) -> None:
        """Add to ``.grad`` of this rank's parameters what the gradients on the outputs of all N rows give.

        Args:
            batch: as for ``embed``; seed and step as well, so that the draws are the same.
            gradients: by output name, of the outputs' shapes, the same on every rank.

        Raises:
            ValueError: for a missing gradient, or one of another shape.
        """
        for name in self.program.outputs:
            if name not in gradients:
                raise ValueError(f"no gradient for output {name!r}{nearest(name, gradients)}")
        given = {f"{GRADIENT}{name}": gradients[name].detach() for name in self.program.outputs}
        padded, _ = self._padded(self.pipeline.program, {**batch, **given}, weights=tuple(given))
        self.pipeline.step(padded, seed=seed, step=step)

    def _padded(
        self, program: BlockProgram, batch: Mapping[str, Tensor], *, weights: tuple[str, ...]
    ) -> tuple[dict[str, Tensor], int]:
        padded = pad_batch(program, batch, multiple=self.pipeline.num_microbatches, weights=weights)
        return padded, program.num_samples(batch)
