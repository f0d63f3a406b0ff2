"""Make a data set: ``python -m data.prepare factbook --out data/factbook``.

A data set appears whole or not at all: it is built in a temporary folder beside its place and renamed. An
existing folder is never overwritten; a finished data set of the same name is left as it is, which makes the
command safe to repeat.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data.factbook import FORMAT, build_factbook

BUILDERS: dict[str, Callable[..., dict[str, Any]]] = {"factbook": build_factbook}


def prepare(name: str, out: Path, **options: Any) -> dict[str, Any] | None:
    """Build data set ``name`` at ``out``; None when a finished one lies there already.

    Raises:
        ValueError: something else lies at ``out``.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        if existing(out) == (name, FORMAT):
            return None
        raise ValueError(f"--out is {out}, which holds something else; name a new folder or remove that one")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        info = BUILDERS[name](temporary, **options)
        os.replace(temporary, out)  # replaces an empty folder, and no other
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return info


def existing(out: Path) -> tuple[str, int] | None:
    """Name and format of the finished data set at ``out``, if there is one."""
    try:
        info = json.loads((out / "dataset.json").read_text(encoding="utf-8"))
        return info["name"], info["format"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m data.prepare", description="Build a data set from installed packages."
    )
    parser.add_argument("name", choices=sorted(BUILDERS), help="which data set")
    parser.add_argument("--out", type=Path, required=True, help="folder to make, for example data/factbook")
    arguments = parser.parse_args(argv)
    from rich.progress import Progress

    begun = time.perf_counter()
    try:
        with Progress(transient=True) as bar:
            task = bar.add_task("starting", total=1.0)
            info = prepare(
                arguments.name,
                arguments.out,
                progress=lambda what, fraction: bar.update(task, description=what, completed=fraction),
            )
    except ModuleNotFoundError as error:
        print(f"package {error.name} is missing; run `pip install -e .[quickstart]`", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"{error}", file=sys.stderr)
        return 2
    if info is None:
        print(f"{arguments.out} already holds the data set {arguments.name}; nothing to do")
        return 0
    documents, counts = info["counts"]["documents"], info["counts"]
    print(
        f"{arguments.out}: {sum(documents.values())} documents "
        f"({', '.join(f'{number} {kind}' for kind, number in documents.items())}), "
        f"{sum(counts['questions'].values())} questions, {counts['pairs']} pairs "
        f"in {time.perf_counter() - begun:.0f} s"
    )
    print(f"left out of it: {len(info['left_out'])} (reasons in {arguments.out / 'dataset.json'})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
