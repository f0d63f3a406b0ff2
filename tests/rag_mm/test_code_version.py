"""The code's version, in a repository and outside of one, and what is said when it changed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from rag_mm import code_version
from rag_mm.code_version import differences


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=n", "-c", "user.email=e")
    done = subprocess.run(["git", "-C", str(folder), *who, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_it_names_package_commit_and_torch():
    found = code_version.code_version()
    assert list(found) == ["rag_mm", "commit", "torch"] and found["torch"] == torch.__version__
    assert re.fullmatch(r"([0-9a-f]{40}\+?)?", found["commit"])


def test_a_commit_and_changes_since(tmp_path: Path):
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("a = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    git(tmp_path, "tag", "-a", "-m", "v1", "v1")  # a tag is no commit
    head = git(tmp_path, "rev-parse", "HEAD")
    assert code_version._commit(tmp_path) == head
    (tmp_path / "code.py").write_text("a = 2\n")
    assert code_version._commit(tmp_path) == head + "+"


def test_no_repository_or_no_git_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert code_version._commit(tmp_path) == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert code_version._commit(Path(code_version.__file__).parent) == ""


def test_other_code_is_said_and_the_same_is_not():
    now = {"rag_mm": "0.2", "commit": "b" * 40, "torch": "2.14.1"}
    assert differences(now, now) == [] and differences(None, now) == []
    (line,) = differences({"rag_mm": "0.2", "commit": "", "torch": "2.13.0"}, now)
    assert f"commit unknown (now {'b' * 40})" in line and "torch 2.13.0 (now 2.14.1)" in line and "rag_mm" not in line
