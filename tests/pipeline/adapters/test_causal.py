"""Causal decoders: losses, ties, caches and what is refused. Parity with the models: test_parity.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.adapters import next_token_targets, program_of, token_loss
from tests.pipeline.adapters.models import LLAMA3_ROPE, SLIDING, drawn, gpt2, llama, tokens

MAKERS = {
    "llama": llama,
    "llama-rope": lambda: llama(rope_parameters=LLAMA3_ROPE),
    "qwen2-sliding": lambda: llama("Qwen2ForCausalLM", **SLIDING),
    "gpt2": gpt2,
}
every_model = pytest.mark.parametrize("name", MAKERS)


@every_model
def test_with_targets_of_the_batch_the_loss_is_transformers_own(name: str) -> None:
    model, batch = drawn(MAKERS[name]()), tokens()
    target, weight = next_token_targets(batch["input_ids"], attention_mask=batch["attention_mask"])
    losses = program_of(model, with_loss=token_loss())({**batch, "target": target, "target_weight": weight})["losses"]
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    assert losses.shape == (6, 1)
    right = model(**batch, labels=labels).loss  # transformers computes it in float32
    torch.testing.assert_close(losses.sum().float(), right, rtol=1e-5, atol=0)


def test_a_head_tied_to_the_embedding_is_one_parameter_in_two_blocks() -> None:
    program = program_of(llama())
    assert "lm_head.weight" not in program.named_parameters_global()
    assert list(program.block_parameters("lm_head")) == ["model.embed_tokens.weight"]
    assert "lm_head.weight" in program_of(llama(tied=False)).named_parameters_global()


def test_tables_have_no_sample_axis_unless_positions_come_from_the_batch() -> None:
    fixed, given = program_of(llama()), program_of(llama(), positions=True)
    assert [fixed.axis(n) for n in ("cos", "sin", "mask")] == [None, None, "sample"]
    assert [given.axis(n) for n in ("cos", "sin", "mask")] == ["sample"] * 3
    assert [b.name for b in program_of(llama(), padding=False).blocks if b.recomputable] == ["rotary"]  # fused kernel
    eager = program_of(gpt2(attn_implementation="eager"), padding=False)
    assert eager.axis("mask") is None
    assert eager.run({"hidden": torch.empty(0), **tokens(padded=False)}, 1, 2)["mask"].shape == (1, 1, 9, 9)
    for program in (fixed, given):
        assert [b.name for b in program.blocks if b.recomputable] == ["rotary", "mask"]


def test_a_program_without_masks_notices_another_attention() -> None:
    model = llama()
    program = program_of(model, padding=False)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="became 'eager' after the program was built"):
        program(tokens(padded=False))


def test_a_mask_shorter_than_the_tokens_is_refused() -> None:
    batch = tokens()
    with pytest.raises(ValueError, match="has 4 positions and there are 9 tokens"):
        program_of(llama())({**batch, "attention_mask": batch["attention_mask"][:, :4]})


def flash() -> Any:
    model = llama()
    model.config._attn_implementation = "flash_attention_2"
    return program_of(model)(tokens())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: program_of(llama(), positions=True, padding=False), "positions=True needs padding=True"),
        (
            lambda: program_of(llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})),
            "rope type 'dynamic'",
        ),
        (lambda: program_of(llama(is_causal=False)), "config.is_causal is False"),
        (lambda: program_of(gpt2(add_cross_attention=True)), "config.add_cross_attention is set"),
        (flash, "'flash_attention_2' makes no mask tensor"),
    ],
)
def test_what_would_compute_something_else_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
