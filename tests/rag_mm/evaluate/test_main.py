import json
from pathlib import Path

import pytest
import yaml

from rag_mm.evaluate.__main__ import main
from rag_mm.evaluate.answer import Run


def test_scores_a_run_and_writes_files(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "result.json"
    arguments = ["--run-dir", str(run.directory), "--num", "20", "--json", str(copy)]
    assert main(arguments) == 0
    result = json.loads((run.directory / "eval" / "test-20.json").read_text())
    assert result == json.loads(copy.read_text())
    assert [row["name"] for row in result["rows"]] == ["most_frequent", "pixels", "gold_document", "joint"]
    assert result["num_questions"] == 20 and result["num_documents"] == len(run.dataset.store)
    assert result["store_version"] == run.dataset.store.version
    assert result["index"]["num_edits"] == 0 and result["fold"] == 0 and result["split"] == "test"
    lines = (run.directory / "eval" / "test-20.predictions.jsonl").read_text().splitlines()
    assert len(lines) == 4 * 20
    shown = capsys.readouterr().out
    assert "hit@1" in shown and "EM by field" in shown
    main([*arguments[:4], "--json", "-"])
    assert json.loads(capsys.readouterr().out) == result  # the same again, to the digit


def test_asks_a_free_question(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = next(s for s in run.dataset.questions("test") if s.image is not None)
    assert picture.image is not None
    (tmp_path / "flag.png").write_bytes(picture.image)
    run_dir = ["--run-dir", str(run.directory)]
    assert main([*run_dir, "--ask", "what is this?", "--image", str(tmp_path / "flag.png")]) == 0
    assert main([*run_dir, "--ask", "what is the capital of Nepal?"]) == 0
    assert "Nepal" in capsys.readouterr().out


def test_set_fact_edits_a_copy(
    run: Run, factbook_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    run_dir = ["--run-dir", str(run.directory)]
    assert main([*run_dir, "--set-fact", "np.capital=Pokhara", "--store-copy", str(copy)]) == 0
    shown = capsys.readouterr().out
    assert "'Pokhara', was 'Kathmandu'" in shown and "index version 0 -> 1" in shown
    assert (copy / "documents" / "edits.jsonl").exists()
    assert not (factbook_dir / "documents" / "edits.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run-dir", "nowhere"], "no run at nowhere; train one with `python train.py"),
        (["--run-dir", "RUN", "--rows", "jiont"], "did you mean joint?"),
        (["--run-dir", "RUN", "--rows", "closed_book"], "closed_book, which needs a run of its own"),
        (["--run-dir", "RUN", "--step", "12"], "--step is 12"),
        (["--run-dir", "RUN", "--split", "train"], "one of test, dev"),
        (["--run-dir", "RUN", "--set-fact", "np.capitol=x"], "did you mean 'capital'?"),
        (["--run-dir", "RUN", "--store-copy", "x"], "only --set-fact edits a store"),
        (["--run-dir", "RUN", "--ask", "x?", "--image", "nowhere.png"], "nowhere.png, which does not exist"),
        (["--run-dir", "RUN", "--ask", "x?", "--image", "YAML"], "cannot be read: not an image"),
        (["--run-dir", "RUN", "--config", "YAML"], "reader.width is 24 in"),
        (["--run-dir", "RUN", "--evaluate.num_beams", "3"], "set evaluate.decoding to beam"),
        (["--run-dir", "RUN", "--evaluate.decoding", "score", "--evaluate.candidates", "x"], "x, which does not exist"),
        (
            ["--run-dir", "RUN", "--parallel.plan", "nowhere.json"],
            "parallel.plan is 'nowhere.json', which is not a file",
        ),
        (["--run-dir", "RUN", "--set-fact", "np.capital=x", "--parallel.data_replicas", "2"], "on one process"),
        (["--run-dirs", "RUN"], "option --run-dirs does not exist; did you mean --run"),
    ],
)
def test_mistakes_are_one_sentence(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    yaml = tmp_path / "other.yaml"
    text = (run.directory / "config.yaml").read_text()
    yaml.write_text(text.replace("width: 16", "width: 24", 1))
    named = {"RUN": str(run.directory), "YAML": str(yaml)}
    with pytest.raises(SystemExit) as ended:
        main([named.get(argument, argument) for argument in arguments])
    said = capsys.readouterr().err.strip()
    assert ended.value.code == 2
    assert message in said and "\n" not in said


def test_where_decoding_and_layout_come_from(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run's own configuration for decoding, a --config for both, flags over either."""
    own = tmp_path / "run"
    own.mkdir()
    text = (run.directory / "config.yaml").read_text()
    assert "decoding: greedy" in text
    (own / "config.yaml").write_text(text.replace("decoding: greedy", "decoding: beam"))
    other = tmp_path / "other.yaml"
    other.write_text("evaluate:\n  decoding: score\nparallel:\n  pipeline_stages: 3\n  schedule: gpipe\n")

    def shown(*arguments: str) -> tuple[str, int, int]:
        with pytest.raises(SystemExit) as ended:
            main(["--run-dir", str(own), *arguments, "--print-config"])
        assert ended.value.code == 0
        config = yaml.safe_load(capsys.readouterr().out)
        return config["evaluate"]["decoding"], config["evaluate"]["num_beams"], config["parallel"]["pipeline_stages"]

    assert shown() == ("beam", 4, 1)
    assert shown("--evaluate.num_beams", "2") == ("beam", 2, 1)
    assert shown("--config", str(other)) == ("score", 4, 3)
    assert shown("--config", str(other), "--parallel.pipeline_stages", "2", "--evaluate.decoding", "beam") == (
        "beam", 4, 2
    )  # fmt: skip


def test_help_explains_decoding_and_layout(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    for option in ("--evaluate.decoding {greedy,beam,score}", "--evaluate.num_beams", "--parallel.pipeline_stages"):
        assert option in said
    assert "the likeliest token each time (greedy), the best of several hypotheses (beam)" in said
