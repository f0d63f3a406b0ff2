"""Make a data set: ``python -m data.prepare factbook --out data/factbook``, or from files of any of `data.formats`.

A data set appears whole or not at all: it is built in a temporary folder beside its place and renamed. An
existing folder is never overwritten; a finished data set of the same name is left as it is, which makes the
command safe to repeat. The factbook is built in half a minute and begins anew; a conversion that was interrupted goes
on where it was.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data.formats import FORMATS, conversion
from data.formats.common import Common
from data.formats.finishing import FORMAT
from data.passages import Chunking

SAY_EVERY_S = 30.0  # where there is no terminal to draw a bar on


def build_factbook(out: Path, **options: Any) -> dict[str, Any]:
    """See `data.factbook`, which is imported here because every process of a conversion imports this module."""
    from data import factbook

    return factbook.build_factbook(out, **options)


BUILDERS: dict[str, Callable[..., dict[str, Any]]] = {"factbook": build_factbook}
EXIT_INTERRUPTED = 75


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
    """Entry point; the exit status: 0 done, 1 failed, 2 wrong input, 75 interrupted."""
    options = _parser().parse_args(argv)
    begun = time.perf_counter()
    try:
        with _progress() as progress:
            if options.name in BUILDERS:
                info = prepare(options.name, options.out, progress=progress)
            else:
                form = FORMATS[options.name].from_options(options)
                info = conversion.prepare(form, _common(options), progress=progress)
    except ModuleNotFoundError as error:
        print(f"package {error.name} is missing; run `pip install -e .[quickstart]`", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"{error}", file=sys.stderr)
        return 2
    except (OSError, RuntimeError) as error:
        print(f"{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return EXIT_INTERRUPTED
    if info is None:
        print(f"{options.out} already holds the data set {options.name}; nothing to do")
        return 0
    _say(options.out, info, time.perf_counter() - begun)
    return 0


def _parser() -> argparse.ArgumentParser:
    wide = functools.partial(argparse.HelpFormatter, max_help_position=16, width=120)
    parser = argparse.ArgumentParser(
        prog="python -m data.prepare",
        formatter_class=wide,
        description="Make a data set that train.py reads, from installed packages (factbook) or from your files.",
        epilog="Options of one: python -m data.prepare NAME --help. Guide: docs/data.md.",
    )
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    factbook = names.add_parser("factbook", help="the quickstart's countries and flags, from installed packages")
    _add_out(factbook)
    for name, form in FORMATS.items():
        one = names.add_parser(
            name, help=form.summary, description=form.summary,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )  # fmt: skip
        _add_out(one)
        form.add_options(one.add_argument_group("what the format has"))
        _add_common(one.add_argument_group("what every format has"))
    return parser


def _add_out(parser: Any) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder to make, for example data/factbook")


def _add_common(parser: Any) -> None:
    cpus = min(8, os.cpu_count() or 1)
    parser.add_argument("--memory", type=Path, metavar="DIR", help="prepared data set whose documents are the memory")
    parser.add_argument("--passage-words", type=int, default=0, help="cut texts into passages of so many words; 0: not")
    parser.add_argument("--overlap", type=int, default=0, help="words that a passage shares with the one before")
    parser.add_argument("--workers", type=int, default=cpus, help="processes")
    parser.add_argument("--rows-per-shard", type=int, default=0, help="lines or rows in a shard; 0: what suits")
    parser.add_argument(
        "--max-bad-share", type=float, default=0.01, help="share of pictures and tars' samples that may be unusable"
    )
    parser.add_argument("--vocabulary", type=int, default=8000, help="entries of the tokenizer to train; 0: none")
    parser.add_argument("--licence", default="unknown", help="licence of the data, to be kept with it")


def _common(options: argparse.Namespace) -> Common:
    return Common(
        out=options.out,
        workers=options.workers,
        chunking=Chunking(options.passage_words, options.overlap),
        rows_per_shard=options.rows_per_shard,
        max_bad_share=options.max_bad_share,
        vocabulary=options.vocabulary,
        licence=options.licence,
        memory=options.memory,
    )


@contextmanager
def _progress() -> Any:
    """A bar with the time left, or lines where there is no terminal; gives what is told (what, share done)."""
    if not sys.stderr.isatty():
        yield _lines(time.monotonic)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)


def _lines(clock: Callable[[], float]) -> Callable[[str, float], None]:
    """Says what is done every `SAY_EVERY_S` seconds, with the time left at the pace so far."""
    begun = said = clock()

    def tell(what: str, share: float) -> None:
        nonlocal said
        now = clock()
        if now - said < SAY_EVERY_S or share >= 1:
            return
        left = f", {(now - begun) * (1 - share) / share:.0f} s left" if share else ""
        print(f"{what}: {share:.0%}{left}", file=sys.stderr, flush=True)
        said = now

    return tell


def _say(out: Path, info: dict[str, Any], seconds: float) -> None:
    counts = info["counts"]
    documents, pairs = counts["documents"], counts["pairs"]
    pairs = pairs if isinstance(pairs, int) else sum(pairs.values())
    print(
        f"{out}: {sum(documents.values())} documents "
        f"({', '.join(f'{number} {kind}' for kind, number in documents.items())}), "
        f"{sum(counts['questions'].values())} questions, {pairs} pairs in {seconds:.0f} s"
    )
    if "made_by" in info:
        if info["columns"]:
            print(f"columns: {', '.join(f'{role}={name}' for role, name in info['columns'].items())}")
        for what in ("left_out", "notes"):
            for reason, entry in info[what].items():
                print(f"{entry['count']} x {reason}; first: {entry['first']}")
    else:
        print(f"left out of it: {len(info['left_out'])} (reasons in {out / 'dataset.json'})")


if __name__ == "__main__":
    sys.exit(main())
