"""The page, a free question and BM25's rows on several ranks: the bytes that one process makes.

Ranks search the index that one process made: `test_layouts` is about making it.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rag_mm.evaluate.answer import load_run
from rag_mm.evaluate.ask import Asker
from rag_mm.evaluate.evaluation import evaluate_run
from rag_mm.evaluate.layout import LayoutConfig
from rag_mm.evaluate.questions import QuestionsConfig
from rag_mm.evaluate.report import write_report
from tests.distributed import run_on_ranks
from tests.rag_mm.evaluate.conftest import save_lively, small_config

ROWS = ["bm25", "no_documents", "bm25_documents", "joint"]
TASK = QuestionsConfig("test", 6)


@dataclass(frozen=True)
class Made:
    """By file name, what was written; and the record of a free question."""

    files: dict[str, bytes]
    asked: dict[str, Any]


def make(run_dir: Path, parallel: LayoutConfig) -> dict[str, Any]:
    run = load_run(run_dir, parallel=parallel)
    made = evaluate_run(run, ROWS, TASK, console=Console(quiet=True))
    write_report(run, made)
    return Asker(run).ask("what is the capital of Nepal?").record()


def written(run_dir: Path) -> dict[str, bytes]:
    """Every file but the lock."""
    return {path.name: path.read_bytes() for path in (run_dir / "eval").glob("[!.]*")}


@pytest.fixture(scope="module")
def run_dir(factbook_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lively") / "run"
    save_lively(small_config(factbook_dir, path))
    return path


@pytest.fixture(scope="module")
def alone(run_dir: Path) -> Made:
    asked = make(run_dir, LayoutConfig())
    return Made(written(run_dir), asked)


@pytest.mark.parametrize(
    "parallel",
    [LayoutConfig(data_replicas=2), LayoutConfig(pipeline_stages=2, towers="piped")],
    ids=["replicas", "stages"],
)
def test_ranks_make_what_one_process_makes(run_dir: Path, alone: Made, parallel: LayoutConfig) -> None:
    shutil.rmtree(run_dir / "eval")
    asked, *others = run_on_ranks(make, 2, run_dir, parallel)
    made = written(run_dir)
    assert made.keys() == alone.files.keys() and len(made) == 3
    for name, contents in alone.files.items():
        assert made[name] == contents, name
    assert asked == alone.asked
    for other in others:
        assert (other["answer"], other["documents"]) == (asked["answer"], asked["documents"])
