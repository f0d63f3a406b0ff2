"""Answering with an index that a build job made: of any kind, on any layout, of these weights and this memory only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from rag_mm.evaluate.__main__ import main
from rag_mm.evaluate.answer import Answerer, load_run
from rag_mm.evaluate.evaluation import evaluate_run
from rag_mm.evaluate.fact_edit import copy_dataset
from rag_mm.evaluate.layout import LayoutConfig
from rag_mm.evaluate.questions import QuestionsConfig
from retriever import build
from retriever import index as index_files
from retriever.embed import pictures
from tests.distributed import run_on_ranks
from tests.rag_mm.evaluate.conftest import save_untrained, small_config

NUM = 12


def built(run_dir: Path, folder: Path, *options: str) -> Path:
    step = max((run_dir / "checkpoints").iterdir())
    given = ["--config", str(run_dir / "config.yaml"), "--index.checkpoint", str(step), "--index.dir", str(folder)]
    assert build.main([*given, "--index.factory", "IVF16,Flat", "--index.recall", "0.5", *options]) == 0
    return folder


@pytest.fixture(scope="module")
def lists(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few lists are visited, so what is found is not what an exact search finds."""
    return built(run_dir, tmp_path_factory.mktemp("built") / "index")


def evaluated(run_dir: Path, *options: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    assert main(["--run-dir", str(run_dir), "--rows", "joint", "--num", str(NUM), *options]) == 0
    path = run_dir / "eval" / f"test-{NUM}.json"
    rows = path.with_suffix(".predictions.jsonl").read_text(encoding="utf-8").splitlines()
    return json.loads(path.read_text(encoding="utf-8")), [json.loads(row) for row in rows]


def refused(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as error:
        main(argv)
    assert error.value.code == 2
    return capsys.readouterr().err


def test_questions_are_answered_with_what_it_finds(run_dir: Path, lists: Path) -> None:
    result, predictions = evaluated(run_dir, "--index", str(lists))
    index = index_files.load(lists)
    assert 0 < index.manifest.effort < 16
    described = {name: result["index"][name] for name in ("directory", "version", "factory", "effort", "weights")}
    manifest = index.manifest
    assert described == {
        "directory": str(lists), "version": 0, "factory": "IVF16,Flat", "effort": manifest.effort,
        "weights": manifest.weights,
    }  # fmt: skip
    run, differs = load_run(run_dir), 0
    questions = QuestionsConfig("test", NUM).of(run.dataset)
    exact = Answerer(run.config, run.dataset, run.model, run.index()).answer(list(questions.of(questions.words)))
    assert len(predictions) == NUM
    for found, sample, other in zip(predictions, questions.of(questions.words), exact, strict=True):
        image, there = pictures([sample.image], run.config.data.image_size)
        with torch.no_grad():
            query = run.model.encoder(run.model.encoder.features([sample.question], image, there, side="query"))
        assert found["documents"] == index.search(query, k=4)[0][0]
        differs += found["documents"] != list(other.document_ids)
    assert differs, "an exact search finds something else"
    capture = evaluated(run_dir)[0]["index"]
    assert capture["factory"] == "Flat", "what was answered with the lists is not taken for it"


def on_ranks(run_dir: Path, parallel: LayoutConfig, folder: Path) -> None:
    run = load_run(run_dir, parallel=parallel)
    evaluate_run(run, ["joint"], QuestionsConfig("test", NUM), console=Console(quiet=True), built=folder)


def test_every_layout_finds_the_same(run_dir: Path, lists: Path) -> None:
    files = [run_dir / "eval" / f"test-{NUM}{end}" for end in (".json", ".predictions.jsonl")]
    on_ranks(run_dir, LayoutConfig(), lists)
    whole = [file.read_bytes() for file in files]
    run_on_ranks(on_ranks, 2, run_dir, LayoutConfig(pipeline_stages=2), lists)
    assert [file.read_bytes() for file in files] == whole


def test_a_question_of_one_s_own_is_answered_with_it(
    run_dir: Path, lists: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--run-dir", str(run_dir), "--ask", "what is the capital of Peru?", "--index", str(lists), "--json", "-"]
    assert main(asked) == 0
    assert json.loads(capsys.readouterr().out)["index"]["directory"] == str(lists)


def test_one_of_other_weights_is_refused(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = built(run_dir, tmp_path / "other", "--index.checkpoint", "", "--train.seed", "1")
    said = refused(["--run-dir", str(run_dir), "--rows", "joint", "--index", str(other)], capsys)
    assert "its weights is" in said and f"--index.checkpoint {run_dir}/checkpoints/step-" in said


def test_one_of_an_earlier_edit_is_refused_until_it_is_brought_up_to_date(
    factbook_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_dataset(factbook_dir, tmp_path / "data")
    run_dir = tmp_path / "run"
    save_untrained(small_config(tmp_path / "data", run_dir))
    folder = built(run_dir, tmp_path / "index")
    load_run(run_dir).dataset.store.delete("np")
    said = refused(["--run-dir", str(run_dir), "--rows", "joint", "--index", str(folder)], capsys)
    assert "covers 0 of the 1 edits" in said and "python -m retriever.build" in said
    built(run_dir, folder)
    assert evaluated(run_dir, "--index", str(folder))[0]["index"]["num_edits"] == 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--rows", "gold_document"], "none of the rows retrieves from it"),
        (["--set-fact", "np.capital=Pokhara"], "--set-fact does not search it"),
        (["--rows", "joint", "--index", "nowhere"], "no index at nowhere"),
    ],
)
def test_what_makes_no_sense_is_said(
    options: list[str], complaint: str, run_dir: Path, lists: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaint in refused(["--run-dir", str(run_dir), "--index", str(lists), *options], capsys)
