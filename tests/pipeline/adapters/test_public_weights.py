"""Real weights: MiniLM (BERT) and SmolLM2-135M (Llama style), cut in two and three, against the uncut model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, BertModel

from pipeline import Pipeline, Plan
from pipeline.adapters import answer_inputs, load_original, original_names, program_of
from pipeline.adapters.prepend import prepend_program
from pipeline.generate import generate
from tests.pipeline.adapters.models import in_stages

SENTENCES = [
    "A man is playing a guitar on stage.",
    "Someone plays music for an audience.",
    "The capital of France is Paris.",
]
# "The capital of France is" and "The capital of", as SmolLM2's tokenizer has them; " Paris".
PROMPTS = ([504, 3575, 282, 4649, 314], [504, 3575, 282])
PARIS = 7042


def cuts_of(program: Any) -> list[tuple[int, ...]]:
    n = len(program.blocks)
    return [(n // 2,), (n // 3, 2 * n // 3)]


@pytest.fixture(scope="module")
def sentences(minilm_dir: Path) -> dict[str, Tensor]:
    encoded = AutoTokenizer.from_pretrained(minilm_dir)(SENTENCES, padding=True, return_tensors="pt")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def test_minilm_in_stages_gives_the_model_s_hidden_states(minilm: Any, sentences: dict[str, Tensor]) -> None:
    program = program_of(minilm)
    with torch.no_grad():
        right = minilm(**sentences)
        for cuts in cuts_of(program):
            found = in_stages(program, sentences, cuts)
            torch.testing.assert_close(found["last_hidden_state"], right.last_hidden_state, rtol=0, atol=1e-5)
            torch.testing.assert_close(found["pooler_output"], right.pooler_output, rtol=0, atol=1e-5)
    mask = sentences["attention_mask"][..., None]
    vectors = F.normalize((found["last_hidden_state"] * mask).sum(1) / mask.sum(1), dim=-1)
    similar, other = (vectors @ vectors.T)[0, 1:].tolist()
    assert similar > 0.4 and similar > other + 0.3  # it is the real model


def test_minilm_s_file_loads_by_its_own_names(minilm: Any, minilm_dir: Path, sentences: dict[str, Tensor]) -> None:
    torch.manual_seed(0)
    model = BertModel(minilm.config).eval()
    program = program_of(model)
    state = load_file(minilm_dir / "model.safetensors")
    extra = set(state) - {name for names in original_names(program, model).values() for name in names}
    assert extra == {"embeddings.position_ids"}  # a constant that older versions stored
    load_original(program, state, original_names(program, model), strict=False)
    with torch.no_grad():
        assert torch.equal(program(sentences)["pooler_output"], program_of(minilm)(sentences)["pooler_output"])


def test_smollm2_in_stages_gives_the_model_s_logits(smollm2: Any) -> None:
    length = max(map(len, PROMPTS))
    rows = torch.tensor([prompt + [0] * (length - len(prompt)) for prompt in PROMPTS])
    seen = torch.tensor([[1] * len(prompt) + [0] * (length - len(prompt)) for prompt in PROMPTS])
    batch = {"input_ids": rows, "attention_mask": seen}
    program = program_of(smollm2)
    assert len(program.blocks) == 35  # embedding, two tables, 30 layers, norm, head
    names = original_names(program, smollm2)
    assert names["model.embed_tokens.weight"] == ("model.embed_tokens.weight", "lm_head.weight")
    with torch.no_grad():
        right = smollm2(**batch).logits
        assert int(right[0, -1].argmax()) == PARIS  # it is the real model
        for cuts in cuts_of(program):
            tables = ["rotary", "mask"]
            for recomputed in ((), tables):
                found = in_stages(program, batch, cuts, recomputed=recomputed)["logits"]
                torch.testing.assert_close(found[seen.bool()], right[seen.bool()], rtol=0, atol=1e-4)


# Documents "The capital of France is Paris." twice, the second with the wrong city's place left out; the question is
# PROMPTS[0] without its last word, with which the answer begins.
FACTS = ([504, 3575, 282, 4649, 314, PARIS, 30], [504, 3575, 282, 4649])


def facts() -> dict[str, Tensor]:
    """Two samples of two documents each, padded on the right, and questions padded on the left."""
    *question, start = PROMPTS[0]
    documents = [*FACTS, *FACTS[::-1]]
    return {
        "document": torch.tensor([row + [0] * (8 - len(row)) for row in documents]),
        "document_mask": torch.tensor([[1] * len(row) + [0] * (8 - len(row)) for row in documents]),
        "question": torch.tensor([[0, *question]] * 2),
        "question_mask": torch.tensor([[0] + [1] * len(question)] * 2),
        "answer_in": torch.tensor([[start]] * 2),
    }


def rows_by_hand() -> list[Tensor]:
    return [torch.tensor([[*first, *second, *PROMPTS[0]]]) for first, second in (FACTS, FACTS[::-1])]


def test_smollm2_reads_documents_in_stages_as_the_model_reads_the_row(smollm2: Any) -> None:
    program, given = prepend_program(smollm2), facts()
    with torch.no_grad():
        right = torch.cat([smollm2(input_ids=row).logits[:, -1:] for row in rows_by_hand()])
        assert right[:, -1].argmax(-1).tolist() == [PARIS, PARIS]
        for cuts in cuts_of(program):
            found = in_stages(program, given, cuts)["logits"]
            torch.testing.assert_close(found, right, rtol=0, atol=1e-4)


def test_smollm2_answers_from_documents_with_caches(smollm2: Any) -> None:
    program, given = prepend_program(smollm2, answer_padding=True), facts()
    right = torch.cat(
        [
            smollm2.generate(input_ids=row, attention_mask=torch.ones_like(row), max_new_tokens=4, do_sample=False)[
                :, row.shape[1] :
            ]
            for row in rows_by_hand()
        ]
    )
    pipeline = Pipeline(program, Plan.from_cuts(program, []))
    start = given.pop("answer_in")
    found = generate(pipeline, given, prompt=start, next_inputs=answer_inputs, end=-1, max_tokens=4)
    assert torch.equal(found.tokens, right) and int(right[0, 0]) == PARIS
