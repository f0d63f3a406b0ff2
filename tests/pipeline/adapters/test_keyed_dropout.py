"""Dropout of public models: where the model has it, and once keyed the same however batch and program are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline import keyed
from pipeline.adapters import program_of
from pipeline.keyed_modules import make_keyed
from tests.pipeline.adapters.models import (
    bert,
    drawn,
    fused_outputs,
    gpt2,
    images,
    in_stages,
    llama,
    model_outputs,
    pairs,
    t5,
    tokens,
    vit,
)

CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], Callable[[], dict[str, Tensor]]]] = {
    "bert": (lambda: bert(dropout=0.2), {}, tokens),
    "vit": (lambda: vit(dropout=0.2), {}, lambda: {"pixel_values": images()}),
    "llama": (lambda: llama(attention_dropout=0.2), {}, tokens),
    "gpt2": (lambda: gpt2(dropout=0.2), {}, tokens),
    "fid": (lambda: t5(dropout=0.2), {"fid": True}, lambda: pairs(decoder_padding=False, fid=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_dropout_is_where_the_model_has_it(name: str) -> None:
    """A program draws in the order of the model, so generator state gives both the same masks."""
    make, options, make_batch = CASES[name]
    model, batch = drawn(make()), make_batch()
    program = program_of(model, **options)
    outputs = fused_outputs if "fid" in options else model_outputs
    torch.manual_seed(0)
    right = outputs(model, batch)
    torch.manual_seed(0)
    found = program(batch)
    for output in right:
        torch.testing.assert_close(found[output], right[output], rtol=0, atol=1e-11)


@pytest.mark.parametrize("program_first", [False, True], ids=["model-keyed", "program-keyed"])
@pytest.mark.parametrize("name", CASES)
def test_masks_do_not_depend_on_the_cut_or_the_split(name: str, program_first: bool) -> None:
    make, options, make_batch = CASES[name]
    model, batch = drawn(make()), make_batch()
    if program_first:
        program = program_of(model, sample_id=True, **options)
        make_keyed(program)
    else:
        program = program_of(make_keyed(model), sample_id=True, **options)
    num_samples = program.num_samples(batch)
    batch["sample_id"] = torch.arange(num_samples) + 100
    with keyed.scope(seed=0, step=1):
        whole = program(batch)
        cut = in_stages(program, batch, (1, len(program.blocks) // 2 + 1))
        parts = [program(program.microbatch(batch, i, 3)) for i in range(3)]
    with keyed.scope(seed=0, step=2):
        other = program(batch)
    for output, right in whole.items():
        assert torch.equal(cut[output], right)
        torch.testing.assert_close(torch.cat([part[output] for part in parts]), right, rtol=0, atol=1e-11)
        assert not torch.allclose(other[output], right)  # it is on
        assert not torch.allclose(program.eval()(batch)[output], right)
        program.train()
