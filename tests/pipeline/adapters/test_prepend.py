"""Documents in front of the question, against the uncut model on rows joined by hand, without padding or mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from pipeline import Pipeline, Plan, keyed
from pipeline.adapters import Prefix, answer_inputs, load_original, original_names, token_loss
from pipeline.adapters.prepend import prepend_program
from pipeline.generate import generate
from pipeline.keyed_modules import make_keyed
from pipeline.lineage import require_sample_lineage
from pipeline.trace import trace
from pipeline.verify import gradient_report, whole_batch_gradients
from tests.distributed import run_on_ranks
from tests.pipeline.adapters.models import SLIDING, bert, drawn, eager, gpt2, in_stages, llama, model_gradients
from tests.pipeline.adapters.prepended import MARGINAL, B, K, Reader, T, batch

MAKERS = {
    "llama": llama,
    "llama-eager": eager(llama),
    "mistral-sliding": lambda: llama("MistralForCausalLM", sliding_window=6),
    "qwen2": lambda: llama("Qwen2ForCausalLM"),
    "qwen2-sliding": lambda: llama("Qwen2ForCausalLM", **{**SLIDING, "sliding_window": 6}),
    "qwen3": lambda: llama("Qwen3ForCausalLM"),
    "gpt2": gpt2,
}
SOME = ("llama", "qwen2-sliding", "gpt2")
NEVER, STEPS = -1, 5


def reader(name: str, *, prefix: bool = True) -> Reader:
    return Reader(drawn(MAKERS[name]()), prefix=prefix)


@pytest.mark.parametrize("prefix", [False, True], ids=["tokens", "vectors"])
@pytest.mark.parametrize("name", MAKERS)
def test_outputs_are_the_model_s_own(name: str, prefix: bool) -> None:
    r, given = reader(name, prefix=prefix), batch(prefix=prefix)
    found, right = r.program(alone="trained")(given), r.all_by_hand(given, alone="trained")
    # The eager path of transformers takes its softmax in float32.
    tolerance = 1e-5 if "eager" in name else 1e-10
    assert list(found) == list(right)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, right[name], rtol=0, atol=tolerance)
    torch.testing.assert_close(r.program()(given)["logits"], right["logits"], rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", SOME)
def test_padding_changes_nothing_whatever_it_holds(name: str) -> None:
    r, given = reader(name), batch(prefix=True)
    right = r.program(alone="detached")(given)
    changed = dict(given)
    for what, mask in (("document", "document_mask"), ("question", "question_mask")):
        changed[what] = torch.where(given[mask].bool(), given[what], 9)
    for what, mask in (("prefix_features", "prefix_mask"), ("question_features", "question_prefix_mask")):
        changed[what] = torch.where(given[mask].bool()[..., None], given[what], 50.0)
    wider = {
        "document": torch.cat([changed["document"], torch.full((B * K, 2), 5)], dim=1),
        "document_mask": torch.cat([changed["document_mask"], torch.zeros(B * K, 2, dtype=torch.long)], dim=1),
    }
    for other in (changed, {**changed, **wider}):
        for name, tensor in r.program(alone="detached")(other).items():
            torch.testing.assert_close(tensor, right[name], rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("alone", ["none", "detached", "trained"])
@pytest.mark.parametrize("name", SOME)
def test_loss_and_gradients_are_those_by_hand(name: str, alone: str, dtype: torch.dtype) -> None:
    r = reader(name).to(dtype)
    given = batch(prefix=True, dtype=dtype)
    loss = token_loss() if alone == "none" else MARGINAL
    program = r.program(alone=alone, with_loss=loss)
    found = whole_batch_gradients(program, given, seed=0, step=0)
    outputs = r.all_by_hand(given, alone=alone)
    right_loss = loss.module(*[{**given, **outputs}[name] for name in loss.reads]).sum()
    right = model_gradients(r, right_loss)
    names = original_names(program, r)
    assert names[next(n for n in names if "embed" in n or "wte" in n)][-1].endswith("lm_head.weight")  # tied
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    assert found.loss == pytest.approx(right_loss.item(), rel=tolerance)
    report = gradient_report(right, {names[n][0]: g for n, g in found.gradients.items()}, tolerance=tolerance)
    assert report, report.message
    assert {name for name, g in right.items() if g.any()} <= {names[n][0] for n in found.gradients}


@pytest.mark.parametrize("name", SOME)
def test_any_cut_gives_equal_outputs_whether_tables_are_sent_or_computed_again(name: str) -> None:
    r, given = reader(name), batch(prefix=True)
    program = r.program(alone="trained")
    whole = program(given)
    tables = [block.name for block in program.blocks if block.recomputable]
    for cut in range(1, len(program.blocks)):
        for recomputed in ((), tables):
            parts = in_stages(program, given, (cut,), recomputed=recomputed)
            assert all(torch.equal(parts[name], whole[name]) for name in whole), (cut, recomputed)


def test_no_block_mixes_samples() -> None:
    program = reader("qwen2-sliding").program(alone="trained", with_loss=MARGINAL)
    require_sample_lineage(trace(program, batch(prefix=True), num_microbatches=2, repeats=1, warmup=0))


def keyed_reader() -> Reader:
    r = Reader(drawn(gpt2(dropout=0.3)), prefix=True)
    make_keyed(r)
    return r


def on_a_rank(cuts: list[int], schedule: str, alone: str, again: bool) -> tuple[str, list[str]]:
    """The report on this rank's gradients with dropout ("" if all are right), and their names."""
    r, given = keyed_reader(), batch(prefix=True)
    program = r.program(alone=alone, with_loss=MARGINAL, sample_id=True)
    right = whole_batch_gradients(program, given, seed=3, step=2)
    tables = [block.name for block in program.blocks if block.recomputable] if again else []
    plan = Plan.from_cuts(program, cuts, schedule=schedule, num_microbatches=2, recomputed=tables)
    pipeline = Pipeline(program, plan, timeout_s=60)
    pipeline.release_other_stages()
    pipeline.step({n: given[n] for n in pipeline.inputs_here}, seed=3, step=2)
    here = {n: p.grad for n, p in pipeline.parameters_here.items() if p.grad is not None}
    report = gradient_report(right.gradients, here, tolerance=1e-10)
    return ("" if report else report.message), sorted(here)


@pytest.mark.parametrize(
    ("cuts", "schedule", "alone", "again"),
    [([6], "1f1b", "trained", False), ([4, 7], "gpipe", "detached", True)],
)
def test_gradients_on_ranks_are_those_of_one_process(cuts: list[int], schedule: str, alone: str, again: bool) -> None:
    """With keyed dropout, and the embedding tied over the first and the last stage."""
    found = run_on_ranks(on_a_rank, len(cuts) + 1, cuts, schedule, alone, again)
    assert not any(message for message, _ in found), found
    assert "transformer.embed.stream.tokens.weight" in set(found[0][1]) & set(found[-1][1])


def test_detached_documents_are_read_without_dropout() -> None:
    r, given = keyed_reader(), batch(prefix=True)
    program = r.program(alone="detached", sample_id=True)
    with keyed.scope(seed=0, step=0):
        found = program(given)
    right = r.eval().all_by_hand(given, alone="detached")
    torch.testing.assert_close(found["alone_log_p"], right["alone_log_p"], rtol=0, atol=1e-10)
    assert not torch.allclose(found["logits"], right["logits"])  # dropout is on there
    assert not r.training and program.train().training
    with keyed.scope(seed=0, step=0):
        program(given)
    assert all(part.training for part in program.modules())  # the mode is put back
    assert not found["alone_log_p"].requires_grad and found["logits"].requires_grad


# With a head of their own, and seeds that make them say something: most random models repeat one token.
SEEDS = {"llama": 0, "qwen2-sliding": 6, "gpt2": 1}
UNTIED = {
    "llama": lambda: llama(tied=False),
    "qwen2-sliding": lambda: llama("Qwen2ForCausalLM", tied=False, **{**SLIDING, "sliding_window": 6}),
    "gpt2": lambda: gpt2(tie_word_embeddings=False),
}


def untied(name: str, *, prefix: bool) -> Reader:
    r = Reader(drawn(UNTIED[name](), seed=SEEDS[name]), prefix=prefix)
    return r.eval()


def prompts(r: Reader, given: dict[str, Tensor]) -> list[Tensor]:
    return [r.prompt(given, b, [b * K + j for j in range(K)]) for b in range(B)]


def right_tokens(r: Reader, given: dict[str, Tensor]) -> Tensor:
    """What ``model.generate`` makes of each prompt alone; the first answer token ends the prompt."""
    rows = []
    for b, prompt in enumerate(prompts(r, given)):
        start = r.model.get_input_embeddings()(given["answer_in"][b, :1])[None]
        rows.append(
            r.model.generate(
                inputs_embeds=torch.cat([prompt, start], dim=1), max_new_tokens=STEPS, do_sample=False,
                pad_token_id=0, eos_token_id=None,
            )[0]
        )  # fmt: skip
    return torch.stack(rows)


def generated(name: str, cuts: list[int], prefix: bool, options: dict[str, Any]) -> Tensor:
    r, given = untied(name, prefix=prefix), batch(prefix=prefix)
    program = r.program(answer_padding=True)
    pipeline = Pipeline(program, Plan.from_cuts(program, cuts, schedule="gpipe"), timeout_s=60)
    start = given.pop("answer_in")[:, :1]
    return generate(
        pipeline, given, prompt=start, next_inputs=answer_inputs, end=NEVER, max_tokens=STEPS, **options
    ).tokens


@pytest.mark.parametrize("prefix", [False, True], ids=["tokens", "vectors"])
@pytest.mark.parametrize("name", SOME)
def test_greedy_tokens_are_the_model_s(name: str, prefix: bool) -> None:
    r = untied(name, prefix=prefix)
    with torch.no_grad():
        right = right_tokens(r, batch(prefix=prefix))
    assert len(right.unique()) > 2  # not one token over and over
    assert torch.equal(generated(name, [], prefix, {}), right)
    assert torch.equal(generated(name, [], prefix, {"cache": False}), right)


@pytest.mark.parametrize("cuts", [[6], [4, 7]])
def test_greedy_tokens_over_stages(cuts: list[int]) -> None:
    r = untied("qwen2-sliding", prefix=True)
    with torch.no_grad():
        right = right_tokens(r, batch(prefix=True))
    found = run_on_ranks(generated, len(cuts) + 1, "qwen2-sliding", cuts, True, {})
    assert all(torch.equal(tokens, right) for tokens in found)


def test_beams_with_caches_are_those_without() -> None:
    with_caches = generated("llama", [], True, {"num_beams": 3})
    assert torch.equal(with_caches, generated("llama", [], True, {"num_beams": 3, "cache": False}))
    assert not torch.equal(with_caches, generated("llama", [], True, {}))  # beams found something else


def test_weights_go_by_the_model_s_own_names() -> None:
    model = llama()
    program = Reader(model, prefix=True).program()
    names = original_names(program, model, strict=False)
    assert {name for originals in names.values() for name in originals} == set(model.state_dict())
    other = llama()
    load_original(program, other.state_dict(), names)
    assert all(torch.equal(p, other.get_parameter(n)) for n, p in model.named_parameters())
    with pytest.raises(ValueError, match=r"'document_prefix.first.weight' is no tensor of this .*strict=False"):
        original_names(program, model)


def test_names_are_the_same_with_single_documents_and_without() -> None:
    r = Reader(llama(tied=False), prefix=True)
    names = [sorted(r.program(alone=alone).named_parameters_global()) for alone in ("none", "detached", "trained")]
    assert names[0] == names[1] == names[2] and "lm_head.lm_head.weight" in names[0]


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"LlamaForCausalLM, .* not of a BertModel"):
        prepend_program(bert())
    with pytest.raises(ValueError, match="alone is 'yes'; allowed: 'none', 'detached', 'trained'"):
        prepend_program(llama(), alone="yes")  # type: ignore[arg-type]
    both = Prefix(nn.Identity(), ("features",), "mask")
    with pytest.raises(ValueError, match="both read 'features'"):
        prepend_program(llama(), document_prefix=both, question_prefix=both)
    program, given = prepend_program(llama(), answer_padding=True), batch(prefix=False)
    with pytest.raises(ValueError, match="answer_mask has 2 positions and answer_in 3"):
        program({**given, "answer_mask": torch.ones(B, T - 1)})
    cache = DynamicCache()
    for block in program.blocks:
        if hasattr(block.module, "extend"):
            block.module.stream.cache = cache
    program({**given, "answer_mask": torch.ones(B, T)})
    with pytest.raises(ValueError, match=r"follow .* cached ones"):
        program({**given, "answer_mask": torch.ones(B, T)})
    two = prepend_program(llama(), answer_padding=True, alone="detached").eval()
    pipeline = Pipeline(two, Plan.from_cuts(two, []))
    with pytest.raises(ValueError, match=r"from all documents; build the program with alone='none'"):
        generate(
            pipeline, given, prompt=given.pop("answer_in")[:, :1], next_inputs=answer_inputs, end=NEVER, max_tokens=2
        )
