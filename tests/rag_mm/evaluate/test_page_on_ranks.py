"""The page, a free question and BM25's rows on two replicas: what one process makes of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rag_mm.evaluate.answer import Run, load_run
from rag_mm.evaluate.ask import Asker
from rag_mm.evaluate.evaluation import evaluate_run
from rag_mm.evaluate.factbook import TaskConfig
from rag_mm.evaluate.layout import LayoutConfig
from rag_mm.evaluate.report import write_report
from tests.distributed import run_on_ranks

ROWS = ["bm25", "no_documents", "bm25_documents", "joint"]


def evaluated(run_dir: Path, parallel: LayoutConfig, page: Path) -> dict[str, Any]:
    run = load_run(run_dir, parallel=parallel)
    made = evaluate_run(run, ROWS, TaskConfig("test", 6), console=Console(quiet=True))
    write_report(run, made, page)
    return Asker(run).ask("what is the capital of Nepal?").record()


def test_replicas_make_what_one_process_makes(run: Run, tmp_path: Path) -> None:
    parallel = LayoutConfig(data_replicas=2)
    copy = tmp_path / "run"
    shutil.copytree(run.directory, copy, ignore=shutil.ignore_patterns("index-eval", "eval"))
    alone = evaluated(copy, LayoutConfig(), tmp_path / "alone.html")
    shutil.rmtree(copy / "eval")
    first, *_ = run_on_ranks(evaluated, 2, copy, parallel, tmp_path / "ranks.html")
    assert (tmp_path / "ranks.html").read_bytes() == (tmp_path / "alone.html").read_bytes()
    for mine, theirs in zip(first.pop("documents"), alone.pop("documents"), strict=True):
        for name in ("score", "log_likelihood", "share"):
            assert mine.pop(name) == pytest.approx(theirs.pop(name), abs=1e-5)
        assert mine == theirs
    assert first == alone  # the answer, the weights' hash, the versions
