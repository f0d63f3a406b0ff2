"""What killed processes left beside index versions goes with the next that are deleted, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from retriever import versions


def test_what_nobody_works_on_is_removed(tmp_path: Path):
    for _ in range(2):
        versions.publish(tmp_path, lambda folder: (folder / "a").write_text("a") and None)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        gone = process.pid
    folder = tmp_path / "versions"
    names = {
        "mine": f".7.{os.getpid()}.tmp",
        "dead": f".8.{gone}.tmp",
        "half gone": ".3.gone.tmp",
        "new": f".9.{gone}.tmp",
    }
    for what, name in names.items():
        (folder / name).mkdir()
        (folder / name / "half").write_text("x")
        if what != "new":
            os.utime(folder / name, (1e9, 1e9))
    versions.prune(tmp_path, keep=1, named={0})
    assert {path.name for path in folder.iterdir()} == {"0", "1", names["mine"], names["new"]}
