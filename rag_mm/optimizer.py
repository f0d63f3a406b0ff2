"""AdamW over the reader and the retriever, each with its own rate, and the one clip over both.

Rates: the retriever warms up from its first step and stays at its peak; from where the reader joins on it is scaled
(0 freezes it), and may be frozen in the first and in the last of those steps. The reader warms up from there. Both
hold their peak and decay to zero over the last 40 % of the joint steps: reading is learned in a sudden step that a
small rate delays. Weight decay is for the reader's matrices.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from pipeline import Pipeline
from rag_mm.config import TrainConfig
from rag_mm.mesh import Mesh
from rag_mm.towers import Towers
from rag_mm.vision_choice import Vision

DECAY_SHARE = 0.4


def rates(config: TrainConfig, step: int) -> tuple[float, float]:
    """Learning rates (reader, retriever) of step ``step`` (from 0)."""
    first, last = config.retriever_moves
    starts = 0 if config.retriever_steps else first
    warm = max(1, config.retriever_warmup_steps)
    retriever = config.retriever_learning_rate * min(1.0, (step - starts + 1) / warm)
    if step < config.retriever_steps:
        alone = config.retriever_steps == config.steps  # then its rate is the one that decays
        return 0.0, retriever * (min(1.0, (1.0 - step / config.steps) / DECAY_SHARE) if alone else 1.0)
    since, length = step - config.retriever_steps, config.steps - config.retriever_steps
    decay = min(1.0, (1.0 - since / length) / DECAY_SHARE)
    reader = config.learning_rate * min(1.0, (since + 1) / max(1, config.warmup_steps)) * decay
    return reader, retriever * config.joint_retriever_scale * decay if first <= step < last else 0.0


class Optimizer:
    """Clips and steps, alike on every rank.

    Attributes:
        names: parameters that this rank updates, by global name.
    """

    def __init__(
        self, config: TrainConfig, towers: Towers, pipeline: Pipeline, vision: Vision | None, mesh: Mesh
    ) -> None:
        self.config, self.mesh = config, mesh
        hoisted = {} if vision is None else {f"reader.{n}": p for n, p in vision.parameters.items() if p.requires_grad}
        reader = {f"reader.{n}": p for n, p in pipeline.parameters_here.items() if p.requires_grad} | hoisted
        retriever = {f"retriever.{n}": p for n, p in (*towers.sharded.items(), *towers.replicated.items())}
        # Of parameters that lie on some stages only, each is counted in the norm by one rank of the pipeline.
        self._owned = {f"reader.{n}" for n in pipeline.owned} | {f"retriever.{n}" for n in towers.owned}
        self._everywhere = {f"retriever.{n}" for n in towers.replicated} | set(hoisted)
        self.names: dict[str, nn.Parameter] = {**reader, **retriever}
        groups = []
        for part, parameters in (("reader", reader), ("retriever", retriever)):
            for decays in (True, False):
                chosen = [p for p in parameters.values() if (p.ndim >= 2) == decays]
                decay = config.weight_decay if decays and part == "reader" else 0.0
                groups.append({"params": chosen, "part": part, "weight_decay": decay})
        self.adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=0.0, betas=(0.9, 0.98), eps=1e-8, foreach=True
        )

    def zero_grad(self) -> None:
        self.adamw.zero_grad(set_to_none=True)

    def norm(self) -> float:
        """Global norm of the gradients, before clipping; the same on every rank (a collective)."""
        square = self._square(self._owned)
        self.mesh.sum([square], group=self.mesh.pipeline)
        square += self._square(self._everywhere)
        return square.sqrt().item()

    def step(self, step: int, *, norm: float) -> None:
        """Clip by the global ``norm`` and update, with the rates of step ``step``."""
        reader_rate, retriever_rate = rates(self.config, step)
        scale = min(1.0, self.config.clip_norm / (norm + 1e-12))
        for parameter in self.names.values():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        for group in self.adamw.param_groups:
            group["lr"] = reader_rate if group["part"] == "reader" else retriever_rate
        self.adamw.step()

    def _square(self, names: Collection[str]) -> torch.Tensor:
        """Sum of squares of the gradients of some parameters of this rank."""
        square = torch.zeros((), dtype=torch.float64)
        for name, parameter in self.names.items():
            if name in names and parameter.grad is not None:
                square += parameter.grad.double().square().sum()
        return square
