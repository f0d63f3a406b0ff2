"""Figures with context worked by hand, and two runs compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rag_mm.evaluate.__main__ import main
from rag_mm.evaluate.answer import Run
from rag_mm.evaluate.bootstrap import paired_bootstrap
from rag_mm.evaluate.compare import runs_of
from rag_mm.evaluate.judging import make_row, score
from rag_mm.evaluate.row_scores import figures, scores_of
from tests.rag_mm.evaluate.test_judging import PREDICTIONS, SAMPLES, SEEN


def test_figures_of_four_questions() -> None:
    row = make_row("joint", score(SAMPLES, PREDICTIONS, SEEN))
    found = {name: (figure["value"], figure["num"]) for name, figure in row["figures"].items()}
    assert found["em"] == (0.5, 4) and found["em kind=picture"] == (0.5, 2) and found["em unseen"] == (0.5, 2)
    assert found["f1"] == (pytest.approx((1 + 0 + 1 + 2 / 3) / 4), 4)
    assert found["hit@1 kind=name"] == (0.5, 2) and found["hit@4 kind=picture"] == (1.0, 2)
    assert found["em field=climate"] == (0.5, 2)
    assert [row["figures"]["em"][end] for end in ("low", "high")] == pytest.approx(row["em_interval"])
    hit = row["figures"]["hit@1 kind=picture"]
    assert [hit["low"], hit["high"]] == pytest.approx(row["hit@1_interval"]["picture"])
    given = make_row("gold_document", score(SAMPLES, PREDICTIONS, SEEN))
    assert "em" in given["figures"] and not any(name.startswith("hit@") for name in given["figures"])


def test_a_kind_that_does_not_occur_has_no_figure() -> None:
    lines = [item.record("joint") for item in score(SAMPLES[:1], PREDICTIONS[:1], SEEN)]
    assert "em kind=picture" not in figures(scores_of(lines))


@pytest.fixture(scope="module")
def evaluated(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose result files say that half of its answers are right, without asking any model."""
    return _evaluated(run, tmp_path_factory.mktemp("a"), lambda i: float(i % 2))


def _evaluated(run: Run, folder: Path, em: Callable[[int], float], **context: Any) -> Path:
    folder.joinpath("eval").mkdir(exist_ok=True)
    shutil.copy(run.directory / "config.yaml", folder)
    lines = []
    for i in range(60):
        lines.append({
            "row": "joint", "id": f"q{i}", "kind": ("name", "picture")[i % 3 == 0], "field": "capital",
            "subject": f"c{i // 3}", "em": em(i), "f1": em(i), "hit": {"hit@1": 1.0}, "unseen_answers": True,
        })  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "eval" / "test.predictions.jsonl").write_text(text)
    made = {"split": "test", "fold": 0, "k": 2, "store_version": "abc+0", "step": 5, **context}
    (folder / "eval" / "test.json").write_text(json.dumps(made))
    return folder


def test_two_runs(run: Run, evaluated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    better = _evaluated(run, tmp_path, lambda i: float(i % 2 or i % 4 == 0), k=4, store_version="abc+1")
    assert main(["--compare", str(better), str(evaluated), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["differs"] == ["store_version", "k"]
    assert (found["num_questions"], found["num_units"]) == (60, 20)
    em = found["figures"]["em"]
    assert (em["a"], em["b"], em["difference"]) == (0.75, 0.5, 0.25)
    groups: list[dict[str, list[float]]] = [{}, {}]
    for i in range(60):
        groups[0].setdefault(f"c{i // 3}", []).append(float(i % 2 or i % 4 == 0))
        groups[1].setdefault(f"c{i // 3}", []).append(float(i % 2))
    assert [em["difference"], em["low"], em["high"]] == pytest.approx(paired_bootstrap(*groups, seed=0))
    assert em["p"] < 0.001  # 15 more right, in 15 countries, none fewer: 2 / 2 ** 15 of all swaps
    assert found["figures"]["hit@1"]["difference"] == 0 and found["figures"]["hit@1"]["p"] == 1
    assert "randomisation test over subjects" in found["test"] and "em" in found["definitions"]
    assert main(["--compare", str(better), str(evaluated)]) == 0
    shown = capsys.readouterr().out
    assert "+0.250" in shown and "k: 4 (a), 2 (b)" in shown


def test_other_questions_are_refused(
    run: Run, evaluated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = _evaluated(run, tmp_path, lambda i: 1.0)
    path = other / "eval" / "test.predictions.jsonl"
    path.write_text(path.read_text().replace('"q7"', '"q99"'))
    said = _refused(["--compare", str(evaluated), str(other)], capsys)
    assert "the same questions on both sides" in said and f"only {evaluated} answered 1: q7" in said and "q99" in said


def test_mistakes_are_one_sentence(run: Run, evaluated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = str(evaluated)
    assert "has no config.yaml; evaluate it first" in _refused(["--compare", a, "nowhere"], capsys)
    assert "has no row pixels" in _refused(["--compare", a, f"{a}:pixels"], capsys)
    assert "did you mean pixels?" in _refused(["--compare", a, f"{a}:pixel"], capsys)
    assert "has no eval/dev.json" in _refused(["--compare", a, a, "--split", "dev"], capsys)
    assert "two folders of runs" in _refused(["--compare", a], capsys)
    assert "--ask and --compare are different things" in _refused(["--compare", a, a, "--ask", "x?"], capsys)
    assert "--ask makes no report" in _refused(["--ask", "x?", "--report", "x.html"], capsys)
    with pytest.raises(ValueError, match="two folders"):
        runs_of("a,b,c")


def _refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    return said
