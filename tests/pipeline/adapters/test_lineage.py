"""Adapters' programs pass the trace: every block may be micro-batched."""

from __future__ import annotations

import pytest

from pipeline.lineage import require_sample_lineage
from pipeline.trace import trace
from tests.pipeline.adapters.models import CASES, drawn


@pytest.mark.parametrize("name", ["bert", "vit", "llama", "llama-left", "gpt2-eager", "fid-padded", "clip"])
def test_no_block_mixes_samples(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    program = case.program(drawn(case.make()))
    profile = trace(program, case.batch(), num_microbatches=3, repeats=1, warmup=0)
    assert {block.name: block.mixes for block in profile.blocks if block.lineage != "sample"} == {}
    require_sample_lineage(profile)
