"""Rows and folds without training: in place of train.py, fresh weights are saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from data.command_line import dump, parse
from data.dataset import Dataset
from rag_mm import experiment, quickstart
from rag_mm.config import Config
from rag_mm.evaluate.training_jobs import Job

from .conftest import save_untrained, small_config


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Configurations of the runs that were started."""
    found: list[Config] = []

    def run_jobs(jobs: Sequence[Job], *, done: Callable[[Job, float], None], **options: object) -> None:
        for job in jobs:
            config = parse(Config, job.flags, prog="", description="")
            found.append(config)
            if not Path(config.run_dir).exists():
                save_untrained(config)
                record = {
                    "step": 1,
                    "loss": 1.0,
                    "losses": {"generation": 1.0},
                    "hit_at_k": 0.5,
                    "token_accuracy": 0.1,
                }
                (Path(config.run_dir) / "metrics.jsonl").write_text(json.dumps(record) + "\n")
            done(job, 1.0)

    monkeypatch.setattr(experiment, "run_jobs", run_jobs)
    return found


@pytest.fixture
def config_yaml(factbook_dir: Path, tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(dump(small_config(factbook_dir, tmp_path / "unused")))
    return path


def test_folds_are_pooled(started: list[Config], config_yaml: Path, factbook_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    rows = "closed_book,joint,pixels,gold_document"
    arguments = [
        "--config",
        str(config_yaml),
        "--out",
        str(out),
        "--rows",
        rows,
        "--folds",
        "0,2",
        "--train.steps",
        "400",
    ]
    assert experiment.main(arguments) == 0
    assert [(c.data.fold, Path(c.run_dir).name, c.train.documents, c.train.steps) for c in started] == [
        (fold, *run)
        for fold in (0, 2)
        for run in (("joint", "retrieved", 400), ("closed_book", "none", 220))  # 0.55 of 400: the reader's share
    ]
    result = json.loads((out / "eval" / "test.json").read_text())
    assert [row["name"] for row in result["rows"]] == ["closed_book", "pixels", "gold_document", "joint"]
    asked = [Dataset(factbook_dir, fold=fold).questions("test").ids for fold in (0, 2)]
    assert result["num_questions"] == len(asked[0]) + len(asked[1])
    assert result["fold"] == [0, 2] and set(result["rows_by_fold"]) == {"0", "2"}
    lines = [json.loads(line) for line in (out / "eval" / "test.predictions.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines if line["row"] == "joint"] == asked[0] + asked[1]
    assert "| joint |" in (out / "eval" / "test.md").read_text()
    assert (out / "fold-2" / "closed_book" / "eval" / "test.json").exists()


def test_quickstart_shows_the_whole_loop(
    started: list[Config], config_yaml: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(quickstart.Quickstart, "_command", lambda self, *arguments: None)  # the index build job
    out = tmp_path / "out"
    assert quickstart.main(["--config", str(config_yaml), "--out", str(out), "--fact", "np.capital=Pokhara"]) == 0
    assert [Path(config.run_dir) for config in started] == [out / "joint", out / "closed_book"]
    result = json.loads((out / "eval" / "test.json").read_text())
    assert [row["name"] for row in result["rows"]] == [
        "most_frequent",
        "closed_book",
        "pixels",
        "gold_document",
        "joint",
    ]
    for name in ("curves.png", "answers.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    shown = capfd.readouterr().out
    assert "supervised_frozen" in shown and "configs/factbook.yaml" in shown
    assert "'Pokhara', was 'Kathmandu'" in shown
    assert "in all" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "joint,pixel"], "did you mean pixels?"),
        (["--folds", "4"], "numbers from 0 to 3"),
        (["--jobs", "0"], "at least 1"),
        (["--data.dir", "nowhere"], "no data set at nowhere; make one with"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        experiment.main(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err
