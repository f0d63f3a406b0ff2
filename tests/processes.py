"""Processes that a test's process started, and theirs."""

from __future__ import annotations

from pathlib import Path


def children(pid: int) -> set[int]:
    """All processes below one."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    below, found = {pid}, set()
    while below:
        below = {child for child, parent in parents.items() if parent in below}
        found |= below
    return found
