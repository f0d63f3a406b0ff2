"""Which code wrote a checkpoint: for somebody who wonders, long after, why numbers moved."""

from __future__ import annotations

import functools
import importlib.metadata
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

GIT_S = 10.0  # for git to answer; without an answer there is no commit


@functools.cache
def code_version() -> dict[str, str]:
    """Versions of this package and of torch, and the commit, "+" for changes since; empty where there is none."""
    try:
        package = importlib.metadata.version("rag_mm")
    except importlib.metadata.PackageNotFoundError:  # run from a folder, not installed
        package = ""
    return {"rag_mm": package, "commit": _commit(Path(__file__).parent), "torch": str(torch.__version__)}


def differences(before: Mapping[str, Any] | None, now: Mapping[str, str]) -> list[str]:
    """What to say of a checkpoint that ``before`` wrote (None: one that does not say)."""
    if before is None:
        return []
    changed = [
        f"{name} {before.get(name) or 'unknown'} (now {value or 'unknown'})"
        for name, value in now.items()
        if before.get(name) != value
    ]
    if not changed:
        return []
    return [f"the checkpoint was written by other code: {', '.join(changed)}; numbers may differ from here on"]


def _commit(folder: Path) -> str:
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
