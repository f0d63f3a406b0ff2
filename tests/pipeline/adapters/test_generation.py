"""Generation with adapters' programs against ``model.generate``, with caches kept by the runtime or by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from pipeline import BlockProgram, Pipeline, Plan
from pipeline.adapters import causal_inputs, decoder_inputs, program_of
from pipeline.generate import generate
from tests.distributed import run_on_ranks
from tests.pipeline.adapters.models import (
    LLAMA3_ROPE,
    SLIDING,
    drawn,
    gpt2,
    ids,
    in_stages,
    llama,
    mask,
    pairs,
    t5,
    tokens,
)

MAKERS = {
    "llama": llama,
    "llama-rope": lambda: llama(rope_parameters=LLAMA3_ROPE),
    "qwen2-sliding": lambda: llama("Qwen2ForCausalLM", **SLIDING),
    "gpt2": gpt2,
}
STEPS = 6
NEVER = -1  # a token that ends nothing


def right_tokens(model: Any, prompt: Tensor, seen: Tensor) -> Tensor:
    found = model.generate(
        input_ids=prompt, attention_mask=seen, max_new_tokens=STEPS, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    return found[:, prompt.shape[1] :]


def generated(program: BlockProgram, cuts: list[int], prompt: Tensor, seen: Tensor, **options: Any) -> Tensor:
    pipeline = Pipeline(program, Plan.from_cuts(program, cuts, schedule="gpipe"), timeout_s=60)
    return generate(
        pipeline, {}, prompt=prompt, next_inputs=causal_inputs(seen), end=NEVER, max_tokens=STEPS, **options
    ).tokens


@pytest.mark.parametrize("name", MAKERS)
def test_greedy_tokens_are_the_model_s(name: str) -> None:
    model = drawn(MAKERS[name]()).eval()
    seen = mask(left=True)
    prompt = ids(seen)
    right = right_tokens(model, prompt, seen)
    program = program_of(model, positions=True)
    assert torch.equal(generated(program, [], prompt, seen), right)
    assert torch.equal(generated(program, [], prompt, seen, cache=False), right)
    assert len(right.unique()) > 2  # not one token over and over


def two_stages() -> Tensor:
    model = drawn(llama()).eval()
    seen = mask(left=True)
    return generated(program_of(model, positions=True), [4], ids(seen), seen)


def test_greedy_tokens_over_two_ranks() -> None:
    seen = mask(left=True)
    right = right_tokens(drawn(llama()).eval(), ids(seen), seen)
    assert all(torch.equal(found, right) for found in run_on_ranks(two_stages, 2))


def test_beams_with_caches_are_those_without() -> None:
    program = program_of(drawn(llama()).eval(), positions=True)
    seen = mask(left=True)
    with_caches = generated(program, [], ids(seen), seen, num_beams=3)
    assert torch.equal(with_caches, generated(program, [], ids(seen), seen, num_beams=3, cache=False))
    assert not torch.equal(with_caches, generated(program, [], ids(seen), seen))  # beams found something else


@pytest.mark.parametrize("num_beams", [1, 3])
def test_fusion_in_decoder_generates_with_caches_what_it_does_without(num_beams: int) -> None:
    program = program_of(drawn(t5()).eval(), fid=True, decoder_padding=True)
    batch = {n: t for n, t in pairs(decoder_padding=False, fid=True).items() if not n.startswith("decoder_")}
    pipeline = Pipeline(program, Plan.from_cuts(program, []))
    found = [
        generate(
            pipeline, batch, prompt=torch.zeros(3, 1, dtype=torch.long), next_inputs=decoder_inputs, end=NEVER,
            max_tokens=STEPS, num_beams=num_beams, cache=cache,
        ).tokens
        for cache in (True, False)
    ]  # fmt: skip
    assert torch.equal(*found) and len(found[0].unique()) > 1
    greedy, env = torch.zeros(3, 1, dtype=torch.long), batch
    for _ in range(STEPS):
        env = {**batch, **decoder_inputs(greedy, 0)}
        greedy = torch.cat([greedy, program(env)["logits"][:, -1:].argmax(-1)], 1)
    assert torch.equal(found[0], greedy[:, 1:]) == (num_beams == 1)


def test_a_cache_may_be_set_by_hand_one_a_stage() -> None:
    """Several new tokens behind cached ones are the last positions of the whole."""
    program = program_of(drawn(llama()).eval(), positions=True)
    cut = len(program.blocks) // 2
    caches = [DynamicCache(), DynamicCache()]
    for i, block in enumerate(program.blocks):
        if hasattr(block.module, "cache"):
            block.module.cache = caches[i >= cut]
    batch = tokens(left=True)
    whole = program_of(drawn(llama()).eval(), positions=True)(batch)["logits"]
    for first, last in ((0, 5), (5, 7), (7, 9)):
        part = {"attention_mask": batch["attention_mask"][:, :last]}
        part |= {name: batch[name][:, first:last] for name in ("input_ids", "position_ids")}
        found = in_stages(program, part, (cut,))["logits"]
        seen = part["attention_mask"][:, first:].bool()
        torch.testing.assert_close(found[seen], whole[:, first:last][seen], rtol=0, atol=1e-11)


def with_cache(program: BlockProgram) -> BlockProgram:
    cache = DynamicCache()
    for block in program.blocks:
        if hasattr(block.module, "cache"):
            block.module.cache = cache
    return program


def test_cached_positions_that_nothing_tells_are_refused() -> None:
    program, batch = with_cache(program_of(drawn(llama()))), tokens()
    program(batch)
    with pytest.raises(ValueError, match=r"9 tokens follow 9 cached ones.*positions=True"):
        program(batch)
    program, batch = with_cache(program_of(drawn(llama()), positions=True)), tokens(left=True)
    program(batch)
    with pytest.raises(ValueError, match=r"there is a mask over 9 positions.*must cover all 18"):
        program(batch)
    program = program_of(drawn(t5()))
    batch = pairs(decoder_padding=False, fid=False)
    for block in program.blocks:
        if hasattr(block.module, "cache"):
            block.module.cache = block.module.new_cache()
    program(batch)
    with pytest.raises(ValueError, match=r"5 tokens follow 5 cached ones.*decoder_padding=True"):
        program(batch)


def test_prompts_are_padded_on_the_left() -> None:
    with pytest.raises(ValueError, match="ends in padding; pad prompts on the left"):
        causal_inputs(mask())
