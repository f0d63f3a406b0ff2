"""T5 and fusion in decoder: position biases, ties, generation. Parity with the model: test_parity.py."""

from __future__ import annotations

from pipeline.adapters import program_of
from tests.pipeline.adapters.models import t5


def test_each_stack_s_bias_is_one_table_and_read_by_all_its_layers() -> None:
    program = program_of(t5(), fid=True)
    for stack in ("encoder", "decoder"):
        assert program.axis(f"{stack}_bias") is None
        readers = [b.name for b in program.blocks if f"{stack}_bias" in b.reads]
        assert readers == [b.name for b in program.blocks if b.name.startswith(f"{stack}.block.")]
    tables = [b.name for b in program.blocks if b.recomputable]
    assert tables == ["encoder.bias", "encoder.mask", "decoder.bias", "decoder.mask", "decoder.context_mask"]


def test_one_embedding_in_three_blocks() -> None:
    program = program_of(t5())
    holders = [
        b.name for b in program.blocks if "encoder.embed.embed_tokens.weight" in program.block_parameters(b.name)
    ]
    assert holders == ["encoder.embed", "decoder.embed", "head"]


def test_the_context_of_all_documents_is_alive_over_the_decoder() -> None:
    program = program_of(t5(), fid=True)
    assert [program.axis(n) for n in ("encoder_output", "context", "context_mask", "logits")] == [
        "pair",
        *["sample"] * 3,
    ]
    layers = [i for i, b in enumerate(program.blocks) if b.name.startswith("decoder.block.")]
    assert all("context" in program.carry(i) for i in layers)
