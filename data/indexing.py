"""``python -m data.shards index DIR``: the index of every tar under a folder, several at a time.

Each index appears by a rename, so the command can be killed at any moment; given again, it does what is missing.
One tar that cannot be indexed does not keep the others from it: all such are named at the end.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console

from data.progress import progress
from data.shards import is_current, read_index, write_index

EXIT_DONE, EXIT_FAILED, EXIT_USER, EXIT_INTERRUPTED = 0, 1, 2, 75


@dataclass(frozen=True)
class Outcome:
    """What came of one tar.

    Attributes:
        tar: the shard.
        is_new: whether it was indexed now; otherwise its index was current.
        num_samples: samples in it, bad ones included.
        bad: samples that cannot be read, by reason.
        ignored: members that belong to no sample, by reason.
        unread: what of its end is not read and why, or empty.
        error: why it could not be indexed, or empty.
    """

    tar: Path
    is_new: bool = True
    num_samples: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    ignored: dict[str, int] = field(default_factory=dict)
    unread: str = ""
    error: str = ""

    @property
    def remark(self) -> str:
        """What one should know beyond the number of samples, or empty."""
        parts = [self.unread] if self.unread else []
        for title, counts in (("bad samples", self.bad), ("ignored", self.ignored)):
            if counts:
                parts.append(f"{title}: {_listed(counts)}")
        return "; ".join(parts)


def index_tar(tar: Path) -> Outcome:
    """Index one tar if its index is missing, damaged or of another size or time."""
    try:
        is_new = not is_current(tar)
        index = write_index(tar) if is_new else read_index(tar)
    except (ValueError, OSError) as error:
        return Outcome(tar, error=str(error))
    unread = f"{index.unread_reason}; {index.unread_bytes} bytes are not read" if index.unread_reason else ""
    return Outcome(tar, is_new, len(index), index.bad_samples, dict(index.ignored), unread)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    directory: Path = arguments.directory
    tars = sorted(directory.rglob("*.tar")) if directory.is_dir() else []
    if not tars:
        print(f"{directory} is not a folder that holds *.tar files", file=sys.stderr)
        return EXIT_USER
    if arguments.workers < 1:
        print(f"--workers is {arguments.workers}; it must be at least 1", file=sys.stderr)
        return EXIT_USER
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        outcomes = _index_all(tars, workers=min(arguments.workers, len(tars)))
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where it was", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenProcessPool:
        print("a worker was killed (out of memory?); the same command goes on, with fewer --workers", file=sys.stderr)
        return EXIT_FAILED
    finally:
        signal.signal(signal.SIGTERM, previous)
    return _report(outcomes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m data.shards", description="Byte-offset indices of tars.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "index",
        help="write the byte-offset index of every *.tar under a folder",
        description="Exit status: 0 all are indexed, 2 some could not be, 75 interrupted (run it again).",
    )
    command.add_argument("directory", type=Path)
    default = min(8, len(os.sched_getaffinity(0)))
    command.add_argument("--workers", type=int, default=default, help=f"processes (default {default})")
    return parser


def _index_all(tars: Sequence[Path], *, workers: int) -> list[Outcome]:
    """The outcome of every tar, in the order given."""
    outcomes: dict[Path, Outcome] = {}
    with progress(Console(stderr=True), "index", len(tars), "tars") as advance:
        if workers == 1:
            for tar in tars:
                outcomes[tar] = index_tar(tar)
                advance(1)
            return list(outcomes.values())
        pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_ignore_interrupts)
        try:
            futures = [pool.submit(index_tar, tar) for tar in tars]
            for future in as_completed(futures):
                outcome = future.result()
                outcomes[outcome.tar] = outcome
                advance(1)
        finally:
            pool.shutdown(cancel_futures=True)
    return [outcomes[tar] for tar in tars]


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the parent lets them finish their tar


def _report(outcomes: Sequence[Outcome]) -> int:
    """Print what is worth knowing of each tar, and the sums; the exit status."""
    bad: Counter[str] = Counter()
    for outcome in outcomes:
        bad.update(outcome.bad)
        if outcome.remark:
            print(f"{outcome.tar}: {outcome.num_samples} samples; {outcome.remark}")
    failed = [outcome for outcome in outcomes if outcome.error]
    new = sum(outcome.is_new for outcome in outcomes) - len(failed)
    print(
        f"{new} tars indexed, {len(outcomes) - new - len(failed)} already were; "
        f"{sum(outcome.num_samples for outcome in outcomes)} samples"
        + (f", {sum(bad.values())} of them bad: {_listed(bad)}" if bad else "")
    )
    for outcome in failed:
        print(outcome.error, file=sys.stderr)
    if failed:
        print(
            f"{len(failed)} of {len(outcomes)} tars could not be indexed; a folder opens only when all its tars are: "
            "mend them or move them out",
            file=sys.stderr,
        )
    return EXIT_USER if failed else EXIT_DONE


def _listed(counts: dict[str, int] | Counter[str]) -> str:
    return ", ".join(f"{count} x {reason}" for reason, count in sorted(counts.items()))
