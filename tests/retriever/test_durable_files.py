"""What must be whole after a crash: looked at, at every call of the system that could be the last."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from retriever.durable_files import put_folder, remove_folder, replace_text


class Killed(BaseException):
    pass


CALLS = ("open", "fsync", "replace", "rename", "rmdir", "unlink")


def kill_before(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Raise at the ``number``-th call that changes something, and at each after it, as a dead process does nothing."""
    count = 0
    for name in CALLS:
        real = getattr(os, name)

        def call(*arguments: Any, _real: Any = real, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count >= number:
                raise Killed
            return _real(*arguments, **options)

        monkeypatch.setattr(os, name, call)


def new_folder(place: Path, text: str) -> Path:
    place.mkdir()
    for name in "abc":
        (place / name).write_text(text)
    return place


def whole(folder: Path, text: str) -> bool:
    return {path.name: path.read_text() for path in folder.iterdir()} == dict.fromkeys("abc", text)


def test_a_small_file_is_the_old_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, other, seen = tmp_path / "plan.json", tmp_path / "other name", set()
    for number in range(1, 40):
        path.unlink(missing_ok=True)
        other.unlink(missing_ok=True)
        path.write_text("old")
        os.link(path, other)
        with monkeypatch.context() as patch:
            kill_before(patch, number)
            try:
                replace_text(path, "new")
                done = True
            except Killed:
                done = False
        seen.add(path.read_text())
        assert other.read_text() == "old"  # replaced, not written over
        if done:
            break
    assert done and seen == {"old", "new"}


def test_what_a_killed_writer_left_goes_later_and_nothing_else_does(tmp_path: Path):
    names = {"old": ".CURRENT.11.tmp", "new": ".CURRENT.12.tmp", "another file's": ".CURRENT2.11.tmp"}
    for what, name in names.items():
        (tmp_path / name).write_text("half")
        if what != "new":
            os.utime(tmp_path / name, (1e9, 1e9))
    replace_text(tmp_path / "CURRENT", "7")
    assert {path.name for path in tmp_path.iterdir()} == {"CURRENT", names["new"], names["another file's"]}


def test_a_folder_with_its_name_is_whole_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    final, seen = tmp_path / "step-3", set()
    for number in range(1, 40):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        new_folder(final, "old")
        temporary = new_folder(tmp_path / ".step-3.tmp", "new")
        with monkeypatch.context() as patch:
            kill_before(patch, number)
            try:
                put_folder(temporary, final)
                done = True
            except Killed:
                done = False
        seen.add("gone" if not final.exists() else "old" if whole(final, "old") else "new")
        assert not final.exists() or whole(final, "old") or whole(final, "new")
        if done:
            break
    assert done and seen == {"old", "gone", "new"}


def test_a_folder_that_is_removed_loses_its_name_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "step-3"
    for number in range(1, 40):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        new_folder(folder, "old")
        with monkeypatch.context() as patch:
            kill_before(patch, number)
            try:
                remove_folder(folder)
                done = True
            except Killed:
                done = False
        assert not folder.exists() or whole(folder, "old")
        if done:
            break
    assert done and list(tmp_path.iterdir()) == []
