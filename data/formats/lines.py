"""Users' files as numbered lines that can be read from the middle.

A file of many gigabytes is read in pieces, by several processes, and an error still names the line it is in. One pass
over the file therefore counts its lines, remembers where every n-th one begins, and takes the checksum on the way.
What is not lines is made lines first, in the folder of the conversion: gzip is unpacked, and a JSON array is written
one element a line as a streaming parser (ijson) meets it; a place is then ``questions[12]`` instead of ``line 13``.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy

BLOCK = 1 << 22  # bytes read at once

Advance = Callable[[int], None]


@dataclass(frozen=True)
class SourceFile:
    """A file that a format reads by lines.

    Attributes:
        name: what the format calls it.
        path: the user's file; ``.gz`` is unpacked.
        array: JSON path of the array whose elements are read ("images", "" for the whole file); None: it has lines;
            "auto": the whole file if it begins with a bracket, else lines.
        header: whether the first line names columns.
    """

    name: str
    path: Path
    array: str | None = None
    header: bool = False


@dataclass(frozen=True)
class Lines:
    """A surveyed file.

    Attributes:
        path: the user's file, for messages.
        file: where the lines are.
        array: JSON path of the array that the lines were, or None.
        header: whether line 0 is one.
        size: of the user's file (bytes).
        mtime_ns: of the user's file.
        sha256: of the user's file.
        num_lines: how many, a header included.
        every: lines between two cuts.
        cuts: byte at which line ``i * every`` begins.
    """

    path: str
    file: str
    array: str | None
    header: bool
    size: int
    mtime_ns: int
    sha256: str
    num_lines: int
    every: int
    cuts: tuple[int, ...]

    def place(self, number: int) -> str:
        """Where a line (from 0) is, in the user's words."""
        return f"{self.path}, line {number + 1}" if self.array is None else f"{self.path}, {self.array}[{number}]"

    def read(self, chunk: int) -> Iterator[tuple[int, str]]:
        """Number and text of the lines of a chunk that are neither blank nor the header.

        Raises:
            ValueError: a line is not UTF-8.
        """
        with open(self.file, "rb") as file:
            file.seek(self.cuts[chunk])
            first = chunk * self.every
            for number in range(first, min(first + self.every, self.num_lines)):
                text = decode(file.readline(), self.place(number), first=number == 0)
                if text.strip() and not (self.header and number == 0):
                    yield number, text

    def read_all(self) -> Iterator[tuple[int, str]]:
        """The same of all chunks."""
        for chunk in range(len(self.cuts)):
            yield from self.read(chunk)

    def columns(self, separator: str = "\t") -> list[str]:
        """The names in the header."""
        with open(self.file, "rb") as file:
            return decode(file.readline(), self.place(0), first=True).split(separator)

    def at(self, offset: int, number: int) -> str:
        """The line (from 0) that begins at a byte."""
        with open(self.file, "rb") as file:
            file.seek(offset)
            return decode(file.readline(), self.place(number), first=number == 0)


def decode(line: bytes, place: str, *, first: bool = False) -> str:
    """A line's text without its end; ValueError names the byte that is not UTF-8."""
    try:
        text = line.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place}: byte {error.start + 1} of the line (0x{line[error.start]:02x}) is not UTF-8; convert the file"
        ) from None
    return text.rstrip("\r\n")


def survey(source: SourceFile, folder: Path, *, every: int, advance: Advance = lambda done: None) -> Lines:
    """Count, cut and hash a file, or take what an earlier run found.

    Args:
        folder: of the conversion; unpacked lines and the result are kept there.
        every: lines a chunk.
        advance: told how many bytes were read.

    Raises:
        ValueError: the file is missing, empty, not what it should be, or has changed since an earlier run.
    """
    try:
        stat = source.path.stat()
        if not source.path.is_file():
            raise IsADirectoryError
    except FileNotFoundError:
        raise ValueError(f"{source.path} does not exist") from None
    except OSError:
        raise ValueError(f"{source.path} is not a file that can be read") from None
    if stat.st_size == 0:
        raise ValueError(f"{source.path} is empty")
    stem = source.name.replace("/", "-")
    kept = folder / f"{stem}.survey.json"
    if kept.exists():
        found = json.loads(kept.read_text())
        lines = Lines(**{**found, "cuts": tuple(found["cuts"])})
        if (lines.size, lines.mtime_ns) != (stat.st_size, stat.st_mtime_ns):
            raise ValueError(
                f"{source.path} has changed since this conversion began; remove {folder.parent} to begin anew"
            )
        advance(stat.st_size)
        return lines
    array = source.array
    if array == "auto":
        with _open(source.path) as file:
            array = "" if file.read(BLOCK).lstrip()[:1] == b"[" else None
    file_of_lines, sha256 = source.path, None
    if array is not None or source.path.suffix == ".gz":
        file_of_lines = folder / f"{stem}.lines"
        sha256 = _sha256(source.path, advance)
        _unpack(source.path, array, file_of_lines)
    num_lines, cuts, own = _count(file_of_lines, every, advance if sha256 is None else lambda done: None)
    if num_lines <= (1 if source.header else 0):
        raise ValueError(f"{source.path} holds nothing" + (" but a header" if num_lines else ""))
    lines = Lines(
        str(source.path), str(file_of_lines), array, source.header, stat.st_size, stat.st_mtime_ns, sha256 or own,
        num_lines, every, cuts,
    )  # fmt: skip
    write_atomically(kept, json.dumps(asdict(lines)))
    return lines


def write_atomically(path: Path, text: str) -> None:
    """Put a small file in place whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked if it is gzip; ValueError, also while it is read, if it is not whole."""
    if path.suffix != ".gz":
        with path.open("rb") as file:
            yield file
        return
    try:
        with gzip.open(path, "rb") as packed:
            yield packed  # type: ignore[misc]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is not a whole gzip file: {error}") from None


def _sha256(path: Path, advance: Advance) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


def _count(path: Path, every: int, advance: Advance) -> tuple[int, tuple[int, ...], str]:
    """Number of lines, where every ``every``-th begins, and the checksum."""
    digest, cuts, newlines, offset, last = hashlib.sha256(), [0], 0, 0, b"\n"
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            advance(len(block))
            count = block.count(b"\n")
            if (newlines + count) // every > newlines // every:
                ends = numpy.flatnonzero(numpy.frombuffer(block, numpy.uint8) == 10)
                first = every - newlines % every  # newlines until the next cut
                cuts += (ends[first - 1 :: every] + offset + 1).tolist()
            newlines, offset, last = newlines + count, offset + len(block), block[-1:]
    if cuts[-1] == offset and len(cuts) > 1:
        cuts.pop()  # nothing follows the last newline
    return newlines + (last != b"\n"), tuple(cuts), digest.hexdigest()


def _unpack(path: Path, array: str | None, target: Path) -> None:
    """Write the elements of an array, or the lines of a gzip file, as lines."""
    temporary = target.with_name(target.name + ".tmp")
    with temporary.open("wb") as out:
        if array is not None:
            out.writelines(_elements(path, array))
        else:
            with _open(path) as packed:
                while block := packed.read(BLOCK):
                    out.write(block)
    os.replace(temporary, target)


def _elements(path: Path, array: str) -> Iterator[bytes]:
    import ijson

    number = 0
    with _open(path) as file:
        try:
            # Without use_float, which refuses whole numbers beyond 64 bits; decimals are written as floats.
            for element in ijson.items(file, f"{array}.item" if array else "item"):
                yield json.dumps(element, ensure_ascii=False, default=float).encode("utf-8") + b"\n"
                number += 1
        except ijson.JSONError as error:
            reason = " ".join(str(error).split())[:120]
            raise ValueError(f"{path} is not valid JSON after {array}[{number}]: {reason}") from None
        except UnicodeEncodeError:
            raise ValueError(f"{path}, {array}[{number}]: a text holds half a character (a lone surrogate)") from None
    if not number:
        what = f"no list {array!r} with anything in it" if array else "no list of objects"
        raise ValueError(f"{path} holds {what}")


def top_level(path: Path, name: str) -> Any:
    """The value of a key at the top of a JSON object, read in one pass without holding the file; None if absent."""
    import ijson

    with _open(path) as file:
        try:
            return next(iter(ijson.items(file, name)), None)
        except ijson.JSONError as error:
            raise ValueError(f"{path} is not valid JSON: {' '.join(str(error).split())[:120]}") from None
