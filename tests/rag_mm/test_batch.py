"""Padding changes nothing: a pair's encoding does not depend on what it is batched with."""

from __future__ import annotations

import torch

from data.config import DataConfig
from data.dataset import Dataset
from rag_mm.batch import Collator, training_answers
from rag_mm.objectives import ObjectivesConfig
from rag_mm.reader.config import ReaderConfig
from rag_mm.reader.fid import fid_program
from rag_mm.renaming import Renaming


def test_encodings_do_not_depend_on_the_bucket(factbook: Dataset):
    torch.manual_seed(0)
    config = ReaderConfig(width=16, heads=2, ffn_width=24)
    program = fid_program(config, ObjectivesConfig(), vocabulary=len(factbook.tokenizer), image_size=24).eval()
    collator = Collator(factbook.tokenizer, DataConfig(), num_patches=9)
    short, long = "capital of Japan?", "which is the very highest of all the points in the country of Nepal, please?"
    documents = {name: factbook.store.fetch([name]) for name in ("jp", "np")}

    def encode(questions: list[str], names: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [documents[name] for name in names]
        pictures = collator.images([row[0].image for row in rows])
        context = collator.context(questions, rows, collator.images([None] * len(rows)), pictures)
        return program.run(context, 0, program.index("answer"))["context"], context["context_mask"]

    alone, alone_mask = encode([short], ["jp"])
    together, mask = encode([short, long], ["jp", "np"])
    assert together.shape[1] > alone.shape[1]
    torch.testing.assert_close(together[0][mask[0]], alone[0][alone_mask[0]], atol=1e-5, rtol=1e-5)


def test_answers_end_with_the_end_mark_and_weigh_one_in_all(factbook: Dataset):
    collator = Collator(factbook.tokenizer, DataConfig(), num_patches=9)
    batch = collator.answers(["Kathmandu", "x"], torch.tensor([1.0, 1.0]))
    lengths = (batch["target_weight"] > 0).sum(1).tolist()
    assert [batch["target"][i, n - 1].item() for i, n in enumerate(lengths)] == [collator.end] * 2
    assert batch["answer_in"][:, 0].tolist() == [collator.bos] * 2
    torch.testing.assert_close(batch["target_weight"].sum(), torch.tensor(1.0))
    weighed = collator.answers(["Kathmandu", "x"], torch.tensor([0.0, 1.0]))
    assert weighed["target_weight"][0].sum() == 0 and weighed["sample_weight"].tolist() == [0.0, 1.0]


def test_long_texts_are_cut_and_counted(factbook: Dataset):
    collator = Collator(factbook.tokenizer, DataConfig(max_answer_tokens=4), num_patches=9)
    collator.answers(["a very long answer indeed", "x"], torch.ones(2))
    assert collator.truncated["answers"] == 1


def test_training_answers_are_named_as_the_documents_are(factbook: Dataset):
    samples = [s for s in factbook.questions("train") if s.field == "capital"]
    values = {"capital": [s.answers[0] for s in samples]}
    renaming = Renaming(values, seed=0, step=0)
    assert training_answers(samples, renaming) == [renaming.value("capital", s.answers[0]) for s in samples]
    assert training_answers(samples, None) == [s.answers[0] for s in samples]
