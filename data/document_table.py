"""The id table of a document store: where the document with this id lies, for tens of millions of ids.

A dictionary of 21 million ids takes some 5 GB in every process. The table is a few flat arrays in one file beside
the shards, mapped into memory: 48 bytes a document and its id, shared by all processes of a node and paged in as it
is used. An id is found by a binary search over sorted 64-bit hashes (XXH3), all ids of a batch at once, and compared
with the id that stands there, so equal hashes do no harm. The file is safetensors: named arrays, no pickles.

It is built once from the shards' indices and holds their tars' names, sizes, times and checksums: where those differ
from what lies in the folder, it is built again. What cannot be a document (a damaged sample, or one without a member
``json``) is left out and counted by reason.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import safetensors.numpy
import xxhash
from numpy.typing import NDArray

from data.image_formats import EXTENSIONS
from data.sample_ids import from_key
from data.shard_index import ShardIndex
from data.shards import fingerprint

FILE = "document_table.safetensors"
FORMAT = 1
_ARRAYS = {
    "id_bytes": numpy.uint8,  # the UTF-8 ids of all documents, one after another
    "id_ends": numpy.int64,  # [N + 1] where each begins, and the last ends
    "hashes": numpy.uint64,  # [N] sorted
    "positions": numpy.uint32,  # [N] whose hash that is
    "starts": numpy.int64,  # [N] first byte in the tar that is the document's
    "extents": numpy.uint32,  # [N, 5] bytes from there on; begin and size of the json, of the picture
    "shard_ends": numpy.int64,  # [shards] documents up to the end of each shard
}
NO_PICTURE = (1 << 32) - 1  # as its size
_NO_JSON, _LARGE = "no member json", "members over 4 GiB apart"


@dataclass(frozen=True)
class ShardEntry:
    """One tar as it was when the table was built; ``mtime_ns`` is 0 where the file system keeps no times."""

    name: str
    size: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True)
class DocumentTable:
    """Documents by position: in the order of the shards, those left out not counted.

    Attributes:
        shards: the tars, in order.
        left_out: samples that are no documents, by reason.
        arrays: see the table of names at the top of the file.
    """

    shards: tuple[ShardEntry, ...]
    left_out: dict[str, int]
    arrays: dict[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.arrays["hashes"])

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the shards' checksums in their order: names and dates do not count."""
        return fingerprint(shard.sha256 for shard in self.shards)

    def id(self, position: int) -> str:
        start, stop = self.arrays["id_ends"][position : position + 2].tolist()
        return self.arrays["id_bytes"][start:stop].tobytes().decode()

    def ids(self, *, step: int = 65536) -> Iterator[str]:
        """All ids by position, a stretch of ``step`` in memory at a time."""
        for first in range(0, len(self), step):
            ends = self.arrays["id_ends"][first : first + step + 1].tolist()
            text = self.arrays["id_bytes"][ends[0] : ends[-1]].tobytes()
            for start, stop in itertools.pairwise(ends):
                yield text[start - ends[0] : stop - ends[0]].decode()

    def find(self, ids: Sequence[str]) -> NDArray[numpy.int64]:
        """The position of each id, -1 where there is no such document."""
        if not len(self) or not ids:
            return numpy.full(len(ids), -1, dtype=numpy.int64)
        encoded = [document_id.encode("utf-8", "surrogatepass") for document_id in ids]
        wanted = numpy.fromiter(map(xxhash.xxh3_64_intdigest, encoded), dtype=numpy.uint64, count=len(ids))
        rows = numpy.minimum(numpy.searchsorted(self.arrays["hashes"], wanted), len(self) - 1)
        positions = self.arrays["positions"][rows].astype(numpy.int64)
        if self._are(encoded, positions):
            return positions
        return numpy.array([self._search(*one) for one in zip(encoded, wanted, rows.tolist(), strict=True)])

    def _are(self, encoded: list[bytes], positions: NDArray[numpy.int64]) -> bool:
        """Whether all these documents have all these ids."""
        starts = self.arrays["id_ends"][positions]
        lengths = self.arrays["id_ends"][positions + 1] - starts
        if lengths.tolist() != list(map(len, encoded)):
            return False
        text = b"".join(encoded)
        gaps = numpy.repeat(starts - numpy.cumsum(lengths) + lengths, lengths)
        return bool((self.arrays["id_bytes"][gaps + numpy.arange(len(text))] == numpy.frombuffer(text, "u1")).all())

    def _search(self, encoded: bytes, wanted: numpy.uint64, row: int) -> int:
        hashes, ends = self.arrays["hashes"], self.arrays["id_ends"]
        while row < len(self) and hashes[row] == wanted:  # the next has the same hash about once in 10^5 stores
            position = int(self.arrays["positions"][row])
            if self.arrays["id_bytes"][ends[position] : ends[position + 1]].tobytes() == encoded:
                return position
            row += 1
        return -1

    def places(self, positions: NDArray[numpy.int64]) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
        """Of each document the number of its shard, its first byte and end there (N, 3); and its row of ``extents``."""
        shard = numpy.searchsorted(self.arrays["shard_ends"], positions, side="right")
        starts, extents = self.arrays["starts"][positions], self.arrays["extents"][positions].astype(numpy.int64)
        return numpy.stack([shard, starts, starts + extents[:, 0]], axis=1), extents

    def to_bytes(self) -> bytes:
        header = {"format": FORMAT, "shards": [asdict(shard) for shard in self.shards], "left_out": self.left_out}
        # A tensor, not the metadata of safetensors, which come out in another order each time.
        return safetensors.numpy.save({"header": numpy.frombuffer(json.dumps(header).encode(), "u1"), **self.arrays})

    def write(self, path: Path) -> None:
        """Put the table at ``path``: whoever looks finds the old file or the new one."""
        temporary = path.with_name(f".{path.name}.tmp-{os.uname().nodename}-{os.getpid()}")
        try:
            with temporary.open("wb") as file:
                file.write(self.to_bytes())
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    @staticmethod
    def open(path: Path) -> DocumentTable:
        """The table at ``path``, mapped into memory; ValueError if it is not one of this format."""
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise ValueError("it is empty")
            return DocumentTable.from_buffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))

    @staticmethod
    def from_buffer(buffer: bytes | mmap.mmap) -> DocumentTable:
        """The table in these bytes, which are not copied; ValueError if they are not one of this format."""
        try:
            # https://huggingface.co/docs/safetensors: the length of the JSON (8 bytes), the JSON, the data
            length = int.from_bytes(buffer[:8], "little")
            described = json.loads(buffer[8 : 8 + length])
            arrays = {}
            for name, entry in described.items():
                begin, end = entry["data_offsets"]
                dtype = numpy.uint8 if name == "header" else _ARRAYS[name]
                data = memoryview(buffer)[8 + length + begin : 8 + length + end]
                arrays[name] = numpy.frombuffer(data, dtype=dtype).reshape(entry["shape"])
            header = json.loads(arrays.pop("header").tobytes())
            if header["format"] != FORMAT or arrays.keys() != _ARRAYS.keys():
                raise ValueError("another format")
            shards = tuple(ShardEntry(**entry) for entry in header["shards"])
            count = len(arrays["hashes"])
            lengths = [len(arrays[name]) for name in ("positions", "starts", "extents", "id_ends", "shard_ends")]
            if lengths != [count, count, count, count + 1, len(shards)] or arrays["extents"].shape[1:] != (5,):
                raise ValueError("its arrays do not fit each other")
            return DocumentTable(shards, header["left_out"], arrays)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a document table of format {FORMAT}: {error}") from error


def build_table(indices: Sequence[ShardIndex], *, times: bool = True) -> DocumentTable:
    """The table of these shards.

    Args:
        times: whether the tars' times mean anything (not where fsspec reads them).

    Raises:
        ValueError: an id occurs twice; names it and its tar.
    """
    left_out: Counter[str] = Counter()
    parts = [_documents(index, left_out) for index in indices]
    counts = [len(part["starts"]) for part in parts]
    if sum(counts) >= 1 << 32:
        raise ValueError(f"a store holds at most {(1 << 32) - 1} documents; these shards hold {sum(counts)}")
    whole = {name: numpy.concatenate([part.pop(name) for part in parts]) for name in list(parts[0])}
    order = numpy.argsort(whole["hashes"], kind="stable").astype(numpy.uint32)
    arrays = {
        "id_bytes": whole["id_bytes"],
        "id_ends": numpy.concatenate([[0], numpy.cumsum(whole["id_lengths"])]).astype(numpy.int64),
        "hashes": whole["hashes"][order],
        "positions": order,
        "starts": whole["starts"],
        "extents": whole["extents"],
        "shard_ends": numpy.cumsum(counts, dtype=numpy.int64),
    }
    shards = tuple(ShardEntry(i.tar.name, i.size, i.mtime_ns if times else 0, i.sha256) for i in indices)
    table = DocumentTable(shards, dict(left_out), arrays)
    _refuse_doubles(table, indices)
    return table


def _documents(index: ShardIndex, left_out: Counter[str]) -> dict[str, NDArray[Any]]:
    """The part of the arrays that comes from one shard."""
    rows = len(index)
    row_of = numpy.repeat(numpy.arange(rows), numpy.diff(index.member_ends, prepend=0))
    place = {"json": numpy.full((rows, 2), -1, numpy.int64), "picture": numpy.full((rows, 2), -1, numpy.int64)}
    for kind, extensions in (("json", ("json",)), ("picture", reversed(EXTENSIONS))):  # the preferred one last
        for extension in extensions:
            if extension in index.extensions:
                mine = index.extension_numbers == index.extensions.index(extension)
                place[kind][row_of[mine]] = numpy.stack([index.offsets[mine], index.sizes[mine]], axis=1)
    json_at, json_size = place["json"].T
    picture_at, picture_size = place["picture"].T
    pictured = picture_at >= 0
    starts = numpy.where(pictured, numpy.minimum(json_at, picture_at), json_at)
    stops = numpy.where(pictured, numpy.maximum(json_at + json_size, picture_at + picture_size), json_at + json_size)
    good = index.problem_numbers == 0
    for reason, bad in ((_NO_JSON, json_at < 0), (_LARGE, stops - starts >= NO_PICTURE)):
        if (good & bad).any():
            left_out[reason] += int((good & bad).sum())
        good = good & ~bad
    left_out.update(index.bad_samples)
    extents = numpy.stack([
        stops - starts, json_at - starts, json_size,
        numpy.where(pictured, picture_at - starts, 0), numpy.where(pictured, picture_size, NO_PICTURE),
    ], axis=1)  # fmt: skip
    names = [from_key(key).encode() for key, wanted in zip(index.keys(), good.tolist(), strict=True) if wanted]
    return {
        "id_bytes": numpy.frombuffer(b"".join(names), numpy.uint8),
        "id_lengths": numpy.fromiter(map(len, names), numpy.int64, count=len(names)),
        "hashes": numpy.fromiter(map(xxhash.xxh3_64_intdigest, names), numpy.uint64, count=len(names)),
        "starts": starts[good],
        "extents": extents[good].astype(numpy.uint32),
    }


def _refuse_doubles(table: DocumentTable, indices: Sequence[ShardIndex]) -> None:
    hashes, positions = table.arrays["hashes"], table.arrays["positions"]
    (same,) = numpy.nonzero(hashes[1:] == hashes[:-1])
    seen: dict[str, int] = {}
    for row in numpy.unique(numpy.concatenate([same, same + 1])).tolist():
        position = int(positions[row])
        document_id = table.id(position)
        if document_id in seen:
            shard = int(numpy.searchsorted(table.arrays["shard_ends"], max(position, seen[document_id]), side="right"))
            raise ValueError(f"{indices[shard].tar}: document id {document_id!r} occurs twice in the store")
        seen[document_id] = position
