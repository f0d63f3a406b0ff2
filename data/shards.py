"""Shards: plain WebDataset tars, and beside each a byte-offset index.

A tar alone can only be read from front to back; retrieval reads at random. So one pass over the tar
headers writes down where every member's bytes lie, and from then on one sample is one ``pread``. The tar
stays an ordinary WebDataset shard (``webdataset``, ``tar tf`` and img2dataset users read it as ever);
nothing is unpacked, nothing is unpickled. The price is a second file that can fall out of step with the
first: it therefore holds the tar's size and SHA-256, and a tar that no longer matches is refused.

A *sample* is the run of members that share a key, the path up to the first dot of the file name
(``a/b.json`` and ``a/b.png`` are ``json`` and ``png`` of sample ``a/b``), as WebDataset defines it.
Links, devices and paths that are absolute or contain ``..`` are never followed: they are counted in
``num_ignored``.

    python -m data.shards index DIR
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
MEMBER_MTIME = 0  # fixed, so that the same samples give the same bytes


@dataclass(frozen=True)
class ShardIndex:
    """Where the members of one tar lie.

    Attributes:
        tar: the shard.
        size: its size (bytes).
        sha256: its checksum; shards are told apart by contents, never by date.
        samples: key -> {extension: (offset, size)}, in the order of the tar.
        ignored: what the tar holds that is not read, by reason.
    """

    tar: Path
    size: int
    sha256: str
    samples: Mapping[str, Mapping[str, tuple[int, int]]]
    ignored: Mapping[str, int]

    @property
    def num_ignored(self) -> int:
        return sum(self.ignored.values())


class Shard:
    """One open shard: random reads by (offset, size) from a file descriptor, safe between threads."""

    def __init__(self, tar: Path) -> None:
        self.index = load_index(tar)
        self._fd = os.open(tar, os.O_RDONLY)

    def read(self, offset: int, size: int) -> bytes:
        data = os.pread(self._fd, size, offset)
        if len(data) != size:
            raise ValueError(f"{self.index.tar} ends inside a sample; index it again or restore it")
        return data

    def sample(self, key: str) -> dict[str, bytes]:
        """All members of one sample, by extension, from a single read."""
        members = self.index.samples[key]
        start, end = extent(members)
        data = self.read(start, end - start)
        return {ext: data[off - start : off - start + size] for ext, (off, size) in members.items()}

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if os is not None and hasattr(self, "_fd"):  # not at interpreter exit, nor when __init__ failed
            self.close()


def extent(members: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """First byte and end of the stretch of tar that holds all ``members``."""
    return min(off for off, _ in members.values()), max(off + size for off, size in members.values())


def index_path(tar: Path) -> Path:
    return tar.with_name(tar.name.removesuffix(".tar") + ".index.json")


def split_key(name: str) -> tuple[str, str] | None:
    """``(key, extension)`` of a member's path, or None if the path is not safe or has no extension."""
    path = name.removeprefix("./")
    if not path or path.startswith("/") or ".." in path.split("/") or "\\" in path:
        return None
    folder, _, base = path.rpartition("/")
    stem, dot, ext = base.partition(".")
    if not stem or not dot or not ext:
        return None
    return (f"{folder}/{stem}" if folder else stem), ext.lower()


def build_index(tar: Path) -> ShardIndex:
    """Pass once over the headers of ``tar`` (any tar, also one that others made)."""
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    ignored: Counter[str] = Counter()
    previous: str | None = None
    try:
        with tarfile.open(tar, "r:") as archive:
            for member in archive:
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    ignored["not a regular file"] += 1
                    continue
                key_ext = split_key(member.name)
                if key_ext is None:
                    ignored["unsafe path or no extension"] += 1
                    continue
                key, ext = key_ext
                if key != previous and key in samples:
                    raise ValueError(f"{tar}: the members of sample {key!r} are not adjacent")
                members = samples.setdefault(key, {})
                if ext in members:
                    raise ValueError(f"{tar}: sample {key!r} has two members {ext!r}")
                members[ext] = (member.offset_data, member.size)
                previous = key
    except tarfile.TarError as error:
        raise ValueError(f"{tar} is not a readable uncompressed tar: {error}") from error
    return ShardIndex(tar, tar.stat().st_size, file_sha256(tar), samples, dict(ignored))


def write_index(tar: Path) -> ShardIndex:
    """Build the index of ``tar`` and put it beside the tar, atomically."""
    index = build_index(tar)
    document = {
        "format": FORMAT,
        "tar": tar.name,
        "size": index.size,
        "mtime_ns": tar.stat().st_mtime_ns,
        "sha256": index.sha256,
        "ignored": index.ignored,
        "samples": index.samples,
    }
    target = index_path(tar)
    temporary = target.with_name(target.name + f".tmp-{os.getpid()}")
    temporary.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")
    os.replace(temporary, target)
    return index


def load_index(tar: Path) -> ShardIndex:
    """Read the index of ``tar``; ValueError when there is none or the tar has changed since.

    An equal size and modification time are believed; with another time (a copied data set) the checksum
    decides.
    """
    remedy = f"run `python -m data.shards index {tar.parent}`"
    path = index_path(tar)
    if not tar.is_file():
        raise FileNotFoundError(f"{tar} does not exist")
    if not path.is_file():
        raise ValueError(f"{tar} has no index {path.name}; {remedy}")
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        samples = {
            key: {ext: (int(off), int(size)) for ext, (off, size) in members.items()}
            for key, members in document["samples"].items()
        }
        size, sha256, mtime_ns = document["size"], document["sha256"], document["mtime_ns"]
        ignored = document["ignored"]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not a shard index of format {FORMAT}; {remedy}") from error
    stat = tar.stat()
    if stat.st_size != size:
        raise ValueError(f"{tar} has {stat.st_size} bytes but its index was made for {size}; {remedy}")
    if stat.st_mtime_ns != mtime_ns and file_sha256(tar) != sha256:
        raise ValueError(f"{tar} has changed since its index was made (checksums differ); {remedy}")
    return ShardIndex(tar, size, sha256, samples, ignored)


def write_shards(
    directory: Path, samples: Iterable[tuple[str, Mapping[str, bytes]]], *, samples_per_shard: int = 100_000
) -> list[ShardIndex]:
    """Write samples as ``shard-000000.tar`` ... with their indices; the same samples give the same bytes."""
    import webdataset  # slow to import and only writers need it

    directory.mkdir(parents=True, exist_ok=True)
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
    for tar in tars:
        os.utime(tar, (0, 0))  # the index names the time; a fixed one keeps its bytes the same too
    return [write_index(tar) for tar in tars]


def shard_paths(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.tar"))


def open_shards(directory: Path) -> list[Shard]:
    tars = shard_paths(directory)
    if not tars:
        raise FileNotFoundError(f"{directory} holds no shards (*.tar)")
    return [Shard(tar) for tar in tars]


def contents_fingerprint(shards: Sequence[Shard]) -> str:
    """SHA-256 over the shards' checksums in their order: names and dates do not count."""
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(bytes.fromhex(shard.index.sha256))
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def iterate(shards: Sequence[Shard]) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Every sample of every shard, front to back."""
    for shard in shards:
        for key in shard.index.samples:
            yield key, shard.sample(key)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m data.shards", description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("index", help="write the byte-offset index of every *.tar under a folder")
    command.add_argument("directory", type=Path)
    arguments = parser.parse_args(argv)
    directory: Path = arguments.directory
    tars = sorted(directory.rglob("*.tar")) if directory.is_dir() else []
    if not tars:
        print(f"{directory} is not a folder that holds *.tar files", file=sys.stderr)
        return 2
    from rich.progress import track

    for tar in track(tars, description="indexing"):
        try:
            index = write_index(tar)
        except (ValueError, OSError) as error:
            print(f"{error}", file=sys.stderr)
            return 2
        note = io.StringIO()
        if index.ignored:
            note.write("; ignored: " + ", ".join(f"{n} x {why}" for why, n in sorted(index.ignored.items())))
        print(f"{tar}: {len(index.samples)} samples{note.getvalue()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
