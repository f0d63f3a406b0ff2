"""Proof that a layout computes the same gradients as one device running the whole batch.

`whole_batch_gradients` is the slow twin: no micro-batches, no stages, no library. It needs memory for
the whole batch on one device; where that is missing, compare with the same cuts and one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline import keyed
from pipeline.program import BlockProgram
from pipeline.runtime import LOSSES

FLOOR = 1e-6


@dataclass(frozen=True)
class Failure:
    """A gradient that is off: ``error`` is max|g - g*| / max(max|g*|, 1e-6 * max over all)."""

    name: str
    error: float
    reason: str


@dataclass(frozen=True)
class GradientReport:
    """Outcome of `compare_gradients`. True where every gradient is within the tolerance.

    Attributes:
        failures: worst first.
        worst: name of the parameter with the largest error ("" if there are none).
        worst_error: its error.
    """

    failures: tuple[Failure, ...]
    worst: str
    worst_error: float
    tolerance: float
    num_compared: int

    def __bool__(self) -> bool:
        return not self.failures

    @property
    def message(self) -> str:
        """One paragraph for a log or an error."""
        if self:
            return (
                f"{self.num_compared} gradients agree within {self.tolerance:g} "
                f"(largest error {self.worst_error:.2e}, {self.worst or 'none'})"
            )
        lines = [f"  {f.name}: {f.reason}" for f in self.failures[:10]]
        more = len(self.failures) - 10
        return "\n".join(
            [
                f"{len(self.failures)} of {self.num_compared} gradients are off by more than {self.tolerance:g}:",
                *lines,
            ]
            + ([f"  and {more} more"] if more > 0 else [])
        )


def gradient_report(
    reference: Mapping[str, Tensor], actual: Mapping[str, Tensor], *, tolerance: float
) -> GradientReport:
    """Compare gradients by name.

    The error of a parameter is ``max|g - g*| / max(max|g*|, 1e-6 * max over all parameters)``: some
    gradients are zero in truth (key biases), where a plain relative error would compare rounding. A
    gradient that is missing counts as zero; one that is not finite fails.

    Args:
        reference: gradients held to be right (g*).
        actual: gradients to judge, of any subset of ``reference``'s names (those of one stage).

    Raises:
        ValueError: if ``actual`` has a name that ``reference`` lacks, or shapes differ.
    """
    largest = max((g.detach().abs().max().item() for g in reference.values() if g.numel()), default=0.0)
    failures, worst, worst_error = [], "", 0.0
    for name, grad in actual.items():
        if name not in reference:
            raise ValueError(f"no reference gradient for {name!r}")
        right = reference[name].detach()
        if grad.shape != right.shape:
            raise ValueError(f"gradient of {name!r} has shape {tuple(grad.shape)}, reference {tuple(right.shape)}")
        if not grad.numel():
            continue
        difference = (grad.detach().to(right) - right).abs().max().item()
        scale = max(right.abs().max().item(), FLOOR * largest)
        error = difference / scale if scale > 0 else (0.0 if difference == 0 else float("inf"))
        if not (torch.isfinite(grad).all() and torch.isfinite(right).all()):
            error = float("inf")
        if error >= worst_error:
            worst, worst_error = name, error
        if not error <= tolerance:
            reason = f"error {error:.2e} (difference {difference:.2e}, largest right value {scale:.2e})"
            failures.append(Failure(name, error, reason))
    failures.sort(key=lambda f: -f.error)
    return GradientReport(tuple(failures), worst, worst_error, tolerance, len(actual))


def compare_gradients(
    reference: Mapping[str, Tensor], actual: Mapping[str, Tensor], *, tolerance: float
) -> list[Failure]:
    """The failures of `gradient_report`, worst first; empty where all gradients agree."""
    return list(gradient_report(reference, actual, tolerance=tolerance).failures)


@dataclass(frozen=True)
class WholeBatch:
    """Outputs, loss and gradients of the whole batch in one piece.

    Attributes:
        gradients: by canonical parameter name; zeros where nothing reached a trainable parameter.
        input_gradients: of batch inputs that require gradients.
    """

    loss: Tensor
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    input_gradients: dict[str, Tensor]


def whole_batch_gradients(program: BlockProgram, batch: Mapping[str, Tensor], *, seed: int, step: int) -> WholeBatch:
    """Gradients of ``losses.sum()`` by one process and one backward; touches no ``.grad``."""
    parameters = {n: p for n, p in program.named_parameters_global().items() if p.requires_grad}
    needed: Sequence[str] = program.inputs_of(0, len(program.blocks))
    env = {name: batch[name].detach().requires_grad_(batch[name].requires_grad) for name in needed}
    leaves = {name: tensor for name, tensor in env.items() if tensor.requires_grad}
    with keyed.scope(seed=seed, step=step):
        outputs = program.run(env)
    loss = outputs[LOSSES].sum()
    wanted = [*parameters.values(), *leaves.values()]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    grads = [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True)]
    count = len(parameters)
    return WholeBatch(
        loss.detach(),
        {name: tensor.detach() for name, tensor in outputs.items()},
        dict(zip(parameters, grads[:count], strict=True)),
        dict(zip(leaves, grads[count:], strict=True)),
    )
