"""Greedy decoding with kept projections against the slow twin: the training program on the growing prefix."""

from __future__ import annotations

import torch

from data.config import DataConfig
from data.dataset import Dataset
from rag_mm.batch import Collator
from rag_mm.objectives import ObjectivesConfig
from rag_mm.reader.config import ReaderConfig
from rag_mm.reader.fid import fid_program
from rag_mm.reader.generate import greedy
from rag_mm.reader.layers import fuse


def test_greedy_equals_the_program_on_each_prefix(factbook: Dataset):
    torch.manual_seed(0)
    config = ReaderConfig(width=16, heads=2, ffn_width=24, encoder_layers=1)
    program = fid_program(config, ObjectivesConfig(pdist=0), vocabulary=len(factbook.tokenizer), image_size=24).eval()
    collator = Collator(factbook.tokenizer, DataConfig(), num_patches=9)
    samples = list(factbook.questions("train"))[:3]
    documents = [factbook.store.fetch([s.country, "jp"]) for s in samples]
    pictures = collator.images([s.image_png for s in samples])
    theirs = collator.images([d.image_png for row in documents for d in row])
    context = collator.context([s.question for s in samples], documents, pictures, theirs)
    context |= {"query_embedding": torch.rand(3, 4), "document_embedding": torch.rand(6, 4)}
    found = greedy(program, context, bos=collator.bos, end=collator.end, max_tokens=6)

    head = program.blocks[-1].module
    answer = torch.full((3, 1), collator.bos)
    for step in range(found.shape[1]):
        batch = {**context, "answer_in": answer, "target": answer, "sample_weight": torch.ones(3)}
        batch |= {"target_weight": torch.ones(answer.shape), "sample_id": torch.arange(3)}
        env = program.run(batch, 0, len(program.blocks) - 1)
        length = context["context_mask"].shape[1]
        prior = head.prior(head.scores(context["query_embedding"], context["document_embedding"]), length)
        token, mask = fuse(context["context_token"], 3), fuse(context["context_mask"], 3)
        keys = head.pointer.keys(fuse(env["context"], 3))
        p = head.pointer.distribution(head.pointer.parts(env["answer"], keys, mask, token, answer, prior), token)
        following = p[:, -1].argmax(-1)
        following = torch.where((found[:, :step] == collator.end).any(1), collator.end, following)
        assert torch.equal(found[:, step], following)
        answer = torch.cat([answer, following[:, None]], dim=1)
