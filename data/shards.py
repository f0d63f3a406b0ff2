"""Shards: plain WebDataset tars, and beside each a byte-offset index.

A tar alone can only be read from front to back; retrieval reads at random. So one pass over a tar writes down
where every member's bytes lie (`data.shard_index`), and from then on one sample is one ``pread``. The tar stays
an ordinary WebDataset shard (``webdataset``, ``tar tf`` and img2dataset users read it as ever); nothing is
unpacked, nothing is unpickled. The price is a second file that can fall out of step with the first: it
therefore holds the tar's size, time and SHA-256, and a tar that no longer matches is refused.

    python -m data.shards index DIR        # every *.tar under DIR, also tars that others wrote
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from data.shard_index import SUFFIX, ShardIndex, build_index, split_key

MEMBER_MTIME = 0  # fixed, so that the same samples give the same bytes
WRITTEN = re.compile(r"shard-[0-9]{6}\.tar")
_ABANDONED_S = 3600.0  # age of a temporary file that nobody is writing any more


def index_path(tar: Path) -> Path:
    return tar.with_name(tar.name.removesuffix(".tar") + SUFFIX)


def write_index(tar: Path, *, own: bool = False) -> ShardIndex:
    """Build the index of ``tar`` and put it beside the tar: whoever looks finds the old one or the new one.

    Args:
        own: the tar was just written by this project, and gets the `time_of` its contents.
    """
    index = build_index(tar)
    if own:
        index = replace(index, mtime_ns=time_of(index.sha256))
        os.utime(tar, ns=(index.mtime_ns, index.mtime_ns))
    target = index_path(tar)
    for old in target.parent.glob(f"{target.name}.tmp-*"):  # of a process that was killed
        if time.time() - old.stat().st_mtime > _ABANDONED_S:
            old.unlink(missing_ok=True)
    temporary = target.with_name(f"{target.name}.tmp-{os.uname().nodename}-{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(index.to_bytes())
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, target)
    return index


def time_of(sha256: str) -> int:
    """A time of modification (ns since 1970, whole seconds) made of a checksum.

    The same samples give the same index, so its tar cannot keep the time it was written at. A fixed time would say
    nothing where one tar takes the place of another of the same size; this one differs.
    """
    return (int(sha256[:8], 16) >> 2) * 10**9  # up to 2004


def read_index(tar: Path) -> ShardIndex:
    """The index beside ``tar``, whether or not it is the tar's; ValueError when there is none or it is damaged."""
    path = index_path(tar)
    try:
        return ShardIndex.from_bytes(path.read_bytes(), tar)
    except FileNotFoundError:
        raise ValueError(f"{tar} has no index {path.name}; {remedy(tar)}") from None
    except ValueError as error:
        raise ValueError(f"{path} is {error}; {remedy(tar)}") from error


def load_index(tar: Path) -> ShardIndex:
    """Read the index of ``tar``; ValueError when there is none or the tar has changed since.

    An equal size and modification time are believed; with another time (a copied data set) the checksum
    decides, which reads the whole tar.
    """
    try:
        stat = tar.stat()
    except FileNotFoundError:
        raise FileNotFoundError(f"{tar} does not exist") from None
    index = read_index(tar)
    if stat.st_size != index.size:
        raise ValueError(f"{tar} has {stat.st_size} bytes but its index was made for {index.size}; {remedy(tar)}")
    if stat.st_mtime_ns != index.mtime_ns and file_sha256(tar) != index.sha256:
        raise ValueError(f"{tar} has changed since its index was made (checksums differ); {remedy(tar)}")
    return index


def is_current(tar: Path) -> bool:
    """Whether ``tar`` has an index of its size and time; nothing else is read."""
    try:
        index = read_index(tar)
    except ValueError:
        return False
    stat = tar.stat()
    return (stat.st_size, stat.st_mtime_ns) == (index.size, index.mtime_ns)


def remedy(tar: Path) -> str:
    return f"run `python -m data.shards index {tar.parent}`"


def write_shards(
    directory: Path, samples: Iterable[tuple[str, Mapping[str, bytes]]], *, samples_per_shard: int = 100_000
) -> list[ShardIndex]:
    """Write samples as ``shard-000000.tar`` ... with their indices; the same samples give the same bytes.

    Shards of these names that are there already are removed first, so that none of a longer data set stays.
    """
    import webdataset  # slow to import and only writers need it

    directory.mkdir(parents=True, exist_ok=True)
    for old in shard_paths(directory):
        if WRITTEN.fullmatch(old.name):
            index_path(old).unlink(missing_ok=True)
            old.unlink()
    pattern = str(directory / "shard-%06d.tar")
    # format: USTAR holds no process-dependent fields; user and group are fixed as well as the time.
    with webdataset.ShardWriter(
        pattern,
        maxcount=samples_per_shard,
        maxsize=1 << 40,
        verbose=0,
        mtime=MEMBER_MTIME,
        user="data",
        group="data",
        encoder=False,
    ) as writer:
        for key, members in samples:
            if "." in key or split_key(f"{key}.x") is None:
                raise ValueError(f"sample key {key!r} is not allowed: no dots, no '..', not absolute")
            writer.write({"__key__": key, **members})
    tars = shard_paths(directory)
    indices = [write_index(tar, own=WRITTEN.fullmatch(tar.name) is not None) for tar in tars]
    for index in indices:
        if index.bad_samples:
            row = int(index.problem_numbers.argmax())
            raise ValueError(f"{index.tar}: sample {index.key(row)!r}: {index.problem(row)}")
    return indices


def shard_paths(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.tar"))


def fingerprint(checksums: Iterable[str]) -> str:
    """SHA-256 over shards' checksums in their order: names and dates do not count."""
    digest = hashlib.sha256()
    for checksum in checksums:
        digest.update(bytes.fromhex(checksum))
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    from data import indexing  # only the command needs processes and progress bars

    return indexing.main(argv)


if __name__ == "__main__":
    sys.exit(main())
