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


def mixes_in_backward(experiment: Experiment, touched: Tensor, untouched: Tensor) -> str:
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
            if name not in grads or differ(grads[name][rows], right, 1e-5 * scale):
                return f"in the backward, {what} of other samples change the gradient of {name!r}"
        return ""

    reason = own_rows(gradients({}, True)[0], "output gradients")
    for kind in ("swapped rows", "large noise", "NaN"):
        changed = experiment.disturbed(kind, touched)
        if not changed or reason:
            break
        grads, theirs = gradients(changed, False)
        reason = own_rows(grads, f"values ({kind})")
        if reason or kind == "NaN":  # 0 * NaN is NaN in a parameter's gradient, by right
            continue
        for new, old in zip(theirs, of_parameters, strict=True):
            if new is not None and old is not None and kind == "swapped rows":
                scale = old.double().nan_to_num().abs().max().item()
                if differ(new, old, 1e-4 * scale):
                    reason = f"in the backward, values ({kind}) of other samples change a parameter's gradient"
    return reason
