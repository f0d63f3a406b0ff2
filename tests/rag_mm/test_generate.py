"""Greedy decoding with kept projections against the slow twin: the training program on the growing prefix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from data.config import DataConfig
from data.dataset import Dataset
from rag_mm.batch import Collator
from rag_mm.objectives import ObjectivesConfig
from rag_mm.reader.config import ReaderConfig
from rag_mm.reader.fusion import reader_program
from rag_mm.reader.generate import greedy


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("fusion", ["fid", "prepend"])
def test_greedy_equals_the_program_on_each_prefix(
    factbook: Dataset, monkeypatch: pytest.MonkeyPatch, fusion: str, seed: int
) -> None:
    torch.manual_seed(seed)
    config = ReaderConfig(fusion=fusion, width=16, heads=2, ffn_width=24, encoder_layers=1)
    vocabulary = len(factbook.tokenizer)
    program = reader_program(config, ObjectivesConfig(pdist=0), vocabulary=vocabulary, image_size=24).eval()
    collator = Collator(factbook.tokenizer, DataConfig(), num_patches=9)
    samples = list(factbook.questions("train"))[:3]
    documents = [factbook.store.fetch([s.subject, "jp"]) for s in samples]
    pictures = collator.images([s.image for s in samples])
    theirs = collator.images([d.image for row in documents for d in row])
    context = collator.context([s.question for s in samples], documents, pictures, theirs)
    context |= {"query_embedding": torch.rand(3, 4), "document_embedding": torch.rand(6, 4)}
    # Untrained readers copy what is there most often, the end of a line; give them something else to say.
    tokens = torch.tensor([5, 6, 7, 8, collator.end])
    shape, g = context["context_token"].shape, torch.Generator().manual_seed(seed)
    context["context_token"] = tokens[torch.randint(len(tokens), shape, generator=g)]
    found = greedy(program, context, bos=collator.bos, end=collator.end, max_tokens=6)
    assert found.shape[1] == 6 and len(found.unique()) > 2

    pointer = program.blocks[-1].module.pointer
    distribution = pointer.distribution
    seen: list[Tensor] = []
    monkeypatch.setattr(pointer, "distribution", lambda *parts: seen.append(distribution(*parts)) or seen[-1])
    answer = torch.full((3, 1), collator.bos)
    for step in range(found.shape[1]):
        ones = torch.ones(3)
        batch = {**context, "answer_in": answer, "target": answer, "sample_weight": ones, "distill_weight": ones}
        program.run({**batch, "target_weight": torch.ones(answer.shape), "sample_id": torch.arange(3)})
        following = seen[-1][:, -1].argmax(-1)
        following = torch.where((found[:, :step] == collator.end).any(1), collator.end, following)
        assert torch.equal(found[:, step], following)
        answer = torch.cat([answer, following[:, None]], dim=1)
