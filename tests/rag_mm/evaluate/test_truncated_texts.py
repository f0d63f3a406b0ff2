"""Texts that the retriever's text tower cuts off: counted by build jobs and evaluation as its tokenizer alone would."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from data.dataset import Dataset
from rag_mm.evaluate.answer import Answerer, load_run
from rag_mm.evaluate.questions import QuestionsConfig
from retriever.build import main as build
from tests.rag_mm.evaluate.conftest import save_untrained, small_config
from tests.retriever.public_models import bert_folder

LIMIT = 6


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return bert_folder(tmp_path_factory.mktemp("bert"))


def num_long(bert: str, texts: list[str]) -> int:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bert)
    return sum(len(tokenizer(text)["input_ids"]) > LIMIT for text in texts)


def test_a_build_counts_over_shards_and_jobs(
    bert: str, factbook_dir: Path, factbook: Dataset, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data.dir", str(factbook_dir), "--index.dir", str(tmp_path / "index"), "--index.shard_size", "256"]
    text = ["--retriever.text", "transformers", "--retriever.text_model", bert]
    assert build([*flags, *text, "--retriever.text_max_tokens", str(LIMIT)]) == 0
    count = num_long(bert, [document.search_text for document in factbook.store.read(factbook.store.ids)])
    assert 0 < count < len(factbook.store)
    said = " ".join(capfd.readouterr().err.split())
    assert f"documents were truncated {count} times for the retriever (retriever.text_max_tokens)" in said
    assert build([*flags[:2], "--index.dir", str(tmp_path / "whole"), *text, "--retriever.text_max_tokens", "64"]) == 0
    assert "truncated" not in capfd.readouterr().err


def test_evaluation_counts_questions(bert: str, factbook_dir: Path, tmp_path: Path) -> None:
    config = small_config(factbook_dir, tmp_path / "run")
    retriever = dataclasses.replace(
        config.retriever, text="transformers", text_model=bert, text_max_tokens=LIMIT + 3, k=2
    )
    save_untrained(dataclasses.replace(config, retriever=retriever))
    run = load_run(tmp_path / "run")
    questions = QuestionsConfig("test", 70).of(run.dataset)
    told = Answerer(run.config, run.dataset, run.model, None, batch_size=16).answer(questions, "gold")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bert)
    for sample, prediction in zip(questions.words, told, strict=True):
        is_long = len(tokenizer(sample.question)["input_ids"]) > LIMIT + 3
        assert prediction.truncated.count("questions for the retriever") == is_long
    assert 0 < sum("questions for the retriever" in prediction.truncated for prediction in told) < 70
