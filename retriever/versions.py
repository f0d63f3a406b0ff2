"""The folder of index versions: numbered folders, and one line that says which is current.

A version is written beside the others under a name that readers do not look at, made durable and renamed; then
``CURRENT`` is replaced. Whoever reads finds the old version or the new one, whenever the writer dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from data.json_files import read_json, read_regular
from retriever.durable_files import put_folder, remove_folder, replace_text, sync
from retriever.manifest import ANEW

LEFT_S = 3600.0  # a version is written in less
VERSION = re.compile(r"0|[1-9][0-9]{0,17}")


def publish(directory: str | Path, write: Callable[[Path], None], *, version: int | None = None) -> int:
    """Have ``write`` fill a new version's folder and make it the current one; gives its number.

    Raises:
        OSError: if it could not be written; what was current before still is.
    """
    directory = Path(directory)
    folder = directory / "versions"
    folder.mkdir(parents=True, exist_ok=True)
    if version is None:
        version = max([-1, *list_versions(directory)]) + 1
    temporary = folder / f".{version}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        write(temporary)
        for path in (*temporary.iterdir(), temporary):
            sync(path)
    except (OSError, RuntimeError) as error:  # faiss raises the latter when a disk is full
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(f"index version {version} of {directory} could not be written: {error}") from error
    put_folder(temporary, folder / str(version))
    replace_text(directory / "CURRENT", f"{version}\n")
    return version


@contextlib.contextmanager
def only_writer(directory: Path) -> Iterator[None]:
    """Hold an index folder for this process.

    Raises:
        ValueError: if another job builds in it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"index.dir is {str(directory)!r}, where another job builds; wait for it, or use another folder"
            ) from None
        yield


def current(directory: Path) -> int:
    """The version that ``CURRENT`` names.

    Raises:
        FileNotFoundError: there is none; says which command makes one.
        ValueError: it holds no number of a version.
    """
    path = directory / "CURRENT"
    try:
        text = read_regular(path, largest=64).decode("ascii", errors="replace").strip()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no index at {directory}; make one with `python -m retriever.build --config ... --index.dir {directory}`"
        ) from None
    if not VERSION.fullmatch(text):
        raise ValueError(f"{path} is damaged: it holds {text!r}, not the number of a version; {ANEW}")
    return int(text)


def list_versions(directory: str | Path) -> list[int]:
    """Numbers of the versions in an index folder, ascending."""
    folder = Path(directory) / "versions"
    return sorted(int(p.name) for p in folder.iterdir() if VERSION.fullmatch(p.name)) if folder.is_dir() else []


def prune(directory: str | Path, *, keep: int, named: Collection[int] = ()) -> None:
    """Delete all versions but the newest ``keep`` and those in ``named``, and what killed processes left of others."""
    for left in (Path(directory) / "versions").glob(".*.tmp"):
        if _is_left(left):
            shutil.rmtree(left, ignore_errors=True)
    for version in list_versions(directory)[:-keep]:
        if version not in named:
            remove_folder(Path(directory) / "versions" / str(version))


def _is_left(temporary: Path) -> bool:
    """Whether nobody works on a temporary folder: its process is gone, and it is not another machine's new one."""
    owner = temporary.name.split(".")[-2]
    try:
        alive = owner.isdecimal() and Path(f"/proc/{owner}").exists()
        return not alive and time.time() - temporary.stat().st_mtime > LEFT_S
    except OSError:
        return False


def named_by_checkpoints(directory: str | Path) -> set[int]:
    """Versions of an index in a run's folder that checkpoints there go on with."""
    named = set()
    for state in Path(directory).parent.glob("checkpoints/step-*/state.json"):
        with contextlib.suppress(OSError, ValueError):  # a checkpoint that is damaged goes on with nothing
            named.add(read_json(state).get("index_version"))
    return {version for version in named if isinstance(version, int)}
