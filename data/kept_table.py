"""Where the id table of a store is kept: found beside the shards, built there once if it is missing or stale.

Several processes of a node open a store at the same time: one builds, under a lock on the folder, the others wait and
map what it wrote. Beside shards that cannot be written to, the table goes into the cache folder if there is one, else
it is built in the memory of each process, and that is said. A store behind fsspec should bring its table along: it is
read into memory whole, and only without it the indices of all shards are.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from data.document_table import FILE, DocumentTable, build_table
from data.folder import FileEntry, Folder
from data.shard_index import ShardIndex
from data.shards import index_path, load_index

_THREADS = 16  # opens are slow, and slow beside each other


def open_table(folder: Folder, *, cache_dir: Path | None = None) -> DocumentTable:
    """The table of the shards in ``folder``.

    Raises:
        FileNotFoundError: the folder holds no shards.
        ValueError: a shard has no index or has changed since; says what to do.
    """
    tars = folder.tars()
    if not tars:
        raise FileNotFoundError(f"{folder} holds no shards (*.tar)")
    if folder.local is None:
        return _read_remote(folder, tars)
    places = [folder.local / FILE]
    if cache_dir is not None:
        name = hashlib.sha256(os.path.realpath(folder.local).encode()).hexdigest()[:32]
        places.append(cache_dir / "tables" / name / FILE)
    if (table := _first_current(places, tars)) is not None:
        return table
    with _alone_in(folder.local):
        if (table := _first_current(places, tars)) is not None:  # another process was faster
            return table
        start = time.perf_counter()
        table = build_table(_local_indices(folder.local, tars))
        for place in places:
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                table.write(place)
            except OSError:
                continue
            return DocumentTable.open(place)
        warnings.warn(
            f"{folder} cannot be written to, so its id table is built by every process that opens it "
            f"({time.perf_counter() - start:.1f} s) and held in memory; "
            "open it once where it can be, or set a cache_dir",
            stacklevel=3,
        )
        return table


def _first_current(places: Sequence[Path], tars: Sequence[FileEntry]) -> DocumentTable | None:
    for place in places:
        try:
            table = DocumentTable.open(place)
        except (OSError, ValueError):  # none, or of another format: built anew
            continue
        if [FileEntry(shard.name, shard.size, shard.mtime_ns) for shard in table.shards] == list(tars):
            return table
    return None


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Nobody else builds in this folder; on a file system without locks several may, to the same end."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _local_indices(directory: Path, tars: Sequence[FileEntry]) -> list[ShardIndex]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(load_index, [directory / tar.name for tar in tars]))


def _read_remote(folder: Folder, tars: Sequence[FileEntry]) -> DocumentTable:
    sizes = [(tar.name, tar.size) for tar in tars]
    if data := folder.read(FILE):
        table = DocumentTable.from_buffer(data)
        if [(shard.name, shard.size) for shard in table.shards] == sizes:
            return table
    with ThreadPoolExecutor(_THREADS) as pool:
        return build_table(list(pool.map(lambda tar: _remote_index(folder, tar), tars)), times=False)


def _remote_index(folder: Folder, tar: FileEntry) -> ShardIndex:
    remedy = "run `python -m data.shards index DIR` where the shards come from, and copy them with their indices"
    name = index_path(Path(tar.name)).name
    data = folder.read(name)
    if not data:
        raise ValueError(f"{folder.path(tar.name)} has no index {name}; {remedy}")
    try:
        index = ShardIndex.from_bytes(data, Path(tar.name))
    except ValueError as error:
        raise ValueError(f"{folder.path(name)} is {error}; {remedy}") from error
    if index.size != tar.size:
        raise ValueError(
            f"{folder.path(tar.name)} has {tar.size} bytes but its index was made for {index.size}; {remedy}"
        )
    return index
