"""A conversion that is taken up notices that tars, pictures or what `datasets` loads are not what they were."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from data import prepare
from data.formats import conversion, processes
from data.formats.pieces import STATE
from tests.data.formats import examples
from tests.data.formats.examples import EXAMPLES
from tests.data.test_prepare import contents


def touch(path: Path) -> None:
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def grow(path: Path) -> None:
    stat = path.stat()
    path.write_bytes(path.read_bytes() + b" ")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # of the same time


def interrupted(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All pieces are done, the end is not."""
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "finish", lambda *args: (_ for _ in ()).throw(OSError("gone")))
        assert prepare.main(argv) == 1


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


PICTURE = "images/val2014/COCO_val2014_000000000001.jpg"
CASES: dict[str, tuple[str, str, Callable[[Path], object], str]] = {
    "tar of another time": ("img2dataset", "laion/00001.tar", touch, "has changed"),
    "tar of another size": ("img2dataset", "laion/00001.tar", grow, "has changed"),
    "tar that is gone": ("img2dataset", "laion/00000.tar", Path.unlink, "is gone"),
    "tar that is new": ("img2dataset", "laion/000000.tar", lambda p: shutil.copy(p.parent / "00000.tar", p), "is new"),
    "parquet": ("img2dataset", "laion/00001.parquet", touch, "has changed"),
    "parquet that is gone": ("img2dataset", "laion/00001.parquet", Path.unlink, "is gone"),
    "picture of another time": ("coco", PICTURE, touch, "has changed"),
    "picture of another size": ("coco", PICTURE, grow, "has changed"),
    "picture that is gone": ("coco", PICTURE, Path.unlink, "is gone"),
    "data set on disk": ("datasets", "saved/dataset_dict.json", touch, "has changed"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_has_changed_is_named(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    name, file, change, what = CASES[case]
    argv = [*EXAMPLES[name][0](tmp_path), "--workers", "1", "--out", str(tmp_path / "out"), "--vocabulary", "0"]
    interrupted(argv, monkeypatch)
    change(tmp_path / file)
    capfd.readouterr()
    assert prepare.main(argv) == 2
    said = capfd.readouterr().err
    assert f"{tmp_path / file} {what} since this conversion began" in said and said.count("\n") == 1
    assert str(tmp_path / ".out.preparing") in said and not (tmp_path / "out").exists()


def test_a_picture_that_was_missing_and_comes_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    argv = [*EXAMPLES["coco"][0](tmp_path), "--workers", "1", "--out", str(tmp_path / "out"), "--vocabulary", "0"]
    argv += ["--max-bad-share", "0.5"]
    (tmp_path / PICTURE).rename(tmp_path / "away.jpg")
    interrupted(argv, monkeypatch)
    (tmp_path / "away.jpg").rename(tmp_path / PICTURE)
    assert prepare.main(argv) == 2
    assert f"{tmp_path / PICTURE} is new since this conversion began" in capfd.readouterr().err


def test_a_memory_that_was_made_anew_is_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    memory = tmp_path / "memory"
    first = [*EXAMPLES["dpr"][0](made(tmp_path / "a")), "--workers", "1", "--vocabulary", "0"]
    assert prepare.main([*first, "--out", str(memory)]) == 0
    second = [
        *EXAMPLES["atlas"][0](made(tmp_path / "b")),
        "--workers",
        "1",
        "--vocabulary",
        "0",
        "--memory",
        str(memory),
    ]
    second += ["--out", str(tmp_path / "out")]
    interrupted(second, monkeypatch)
    touch(memory / "dataset.json")
    assert prepare.main(second) == 2
    assert f"{memory / 'dataset.json'} has changed since" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["img2dataset", "coco", "datasets"])
def test_what_has_not_changed_is_gone_on_with(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    argv = [*EXAMPLES[name][0](made(tmp_path / "in")), "--workers", "1", "--vocabulary", "0"]
    assert prepare.main([*argv, "--out", str(tmp_path / "whole")]) == 0
    again = [*argv, "--out", str(tmp_path / "out")]
    interrupted(again, monkeypatch)
    state = tmp_path / ".out.preparing" / STATE
    kept = {p.name: p.stat().st_mtime_ns for p in state.glob("*-0*.json")}
    assert kept
    seen: list[dict[str, int]] = []
    whole = processes.convert

    def watched(job, piece):
        record = whole(job, piece)
        seen.append({p.name: p.stat().st_mtime_ns for p in state.glob("*-0*.json")})
        return record

    monkeypatch.setattr(processes, "convert", watched)
    assert prepare.main(again) == 0
    assert all(one == kept for one in seen)  # nothing was done twice
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_pictures_in_other_folders_are_noted_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    argv = [*examples.folder(tmp_path), "--workers", "1", "--out", str(tmp_path / "out"), "--vocabulary", "0"]
    interrupted(argv, monkeypatch)
    touch(tmp_path / "pictures" / "2.png")
    assert prepare.main(argv) == 2
