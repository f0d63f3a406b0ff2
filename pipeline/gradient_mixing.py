"""Mixing that shows in the backward: gradients that reach, or depend on, other samples.

A function may treat every sample by itself in the forward and still mix in its backward (a normalised or
clipped gradient, a saved maximum). Gradients are compared for the untouched side of the batch alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pipeline.disturbance import Experiment, differ
from pipeline.isolate import call, cut_off, unchanged_buffers
from pipeline.mixing_site import backward_site


def mixes_in_backward(experiment: Experiment, touched: Tensor, untouched: Tensor) -> str:
    """Where and how gradients mix, or an empty string.

    Three kinds of runs: weights on the untouched side's outputs only; on both sides' outputs; and on the
    untouched side's with the other side's inputs disturbed.
    """
    runs = _Runs(experiment, touched)
    alone, of_parameters = runs.gradients({}, both=False)

    def found(reason: str, changed: Mapping[str, Tensor], *, both: bool) -> str:
        def run(disturbed: bool) -> object:
            return runs.gradients(changed, both=both) if disturbed else runs.gradients({}, both=False)

        block = experiment.block
        where = backward_site(block.name, block.module, run, untouched, experiment.num_samples)
        return f"{where}: in the backward, {reason}"

    def moved(grads: Mapping[str, Tensor]) -> str:
        for name, grad in alone.items():
            rows = experiment.rows(grad, untouched)
            right = grad[rows]
            scale = right.double().nan_to_num().abs().max().item() if right.numel() else 0.0
            if name not in grads or differ(grads[name][rows], right, 1e-5 * scale):
                return name
        return ""

    for name, grad in alone.items():
        if bool((grad[experiment.rows(grad, touched)] != 0).any()):
            return found(f"gradients of one sample's outputs reach {name!r} of other samples", {}, both=True)
    if name := moved(runs.gradients({}, both=True)[0]):
        return found(f"output gradients of other samples change the gradient of {name!r}", {}, both=True)
    for kind in ("swapped rows", "large noise", "NaN"):
        changed = experiment.disturbed(kind, touched)
        if not changed:
            continue
        grads, theirs = runs.gradients(changed, both=False)
        if name := moved(grads):
            return found(f"values ({kind}) of other samples change the gradient of {name!r}", changed, both=False)
        if kind != "swapped rows":  # infinities and 0 * NaN are NaN in a parameter's gradient, by right
            continue
        for new, old in zip(theirs, of_parameters, strict=True):
            if new is None or old is None:
                continue
            if differ(new, old, 1e-4 * old.double().nan_to_num().abs().max().item()):
                return found(f"values ({kind}) of other samples change a parameter's gradient", changed, both=False)
    return ""


class _Runs:
    """Backward passes of one block, with output gradients for the untouched side or for both."""

    def __init__(self, experiment: Experiment, touched: Tensor) -> None:
        self.experiment, self.touched = experiment, touched
        block, env, program = experiment.block, experiment.env, experiment.program
        self.floats = sorted({n for n in block.reads if env[n].is_floating_point() and program.has_samples(n)})
        self.parameters = [p for p in block.module.parameters() if p.requires_grad]

    def gradients(self, changed: Mapping[str, Tensor], *, both: bool) -> tuple[dict[str, Tensor], list[Tensor | None]]:
        """Gradients of the floating-point inputs that have samples, by name, and of the parameters."""
        experiment, block = self.experiment, self.experiment.block
        with unchanged_buffers(block.module), torch.enable_grad():
            inputs = cut_off(block, {**experiment.env, **changed}, set(self.floats))
            outputs = call(block, inputs, ids=experiment.ids)
            g = torch.Generator().manual_seed(2)
            roots, weights = [], []
            for name, tensor in outputs.items():
                weight = torch.rand(tensor.shape, generator=g).to(tensor.device) + 0.5
                if not tensor.requires_grad or not experiment.program.has_samples(name):
                    continue
                if not both:
                    weight[experiment.rows(tensor, self.touched)] = 0.0
                roots.append(tensor)
                weights.append(weight.to(tensor.dtype))
            if not roots or not (self.floats or self.parameters):
                return {}, []
            wanted = [inputs[n] for n in self.floats] + self.parameters
            found = torch.autograd.grad(roots, wanted, weights, allow_unused=True)
        count = len(self.floats)
        by_name = {n: grad for n, grad in zip(self.floats, found[:count], strict=True) if grad is not None}
        return by_name, list(found[count:])
