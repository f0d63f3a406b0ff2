"""What a format is: options, the files it reads by lines, and how a piece of them becomes documents and samples.

A format says *what* stands in a file; `data.formats.conversion` does the rest (pieces, processes, resuming, ids,
passages, counting, shards). Options are the fields of its dataclass, which also are its flags.
"""

from __future__ import annotations

import argparse
import dataclasses
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from data.document_store import Document
from data.formats.id_tables import MemoryIds
from data.formats.lines import Lines, SourceFile
from data.formats.pictures import BadPicture
from data.samples import Pair, Sample

SPLITS = ("train", "dev", "test")
Item = tuple[int, "Document | Sample | Pair"]  # place (line or row, from 0) and what stands there


def option(help: str, *, default: Any = dataclasses.MISSING, **argparse_options: Any) -> Any:
    """A field that is a flag; without a default it must be given."""
    metadata = {"help": help, "argparse": argparse_options}
    if isinstance(default, tuple):
        return dataclasses.field(default_factory=lambda: default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def file(help: str) -> Any:
    """A flag that takes a file, and need not be given."""
    return option(help, default=None, type=Path, metavar="FILE")


def files(help: str) -> Any:
    """A flag that takes any number of files."""
    return option(help, default=(), type=Path, nargs="+", metavar="FILE")


@dataclass(frozen=True)
class Piece:
    """A part of the work that gives one shard, whoever does it and when.

    Attributes:
        folder: the shard's, such as "documents" or "questions/dev".
        source: name of the source.
        start: the first chunk, row or file of it.
        stop: behind the last one.
        number: of the shard in its folder.
    """

    folder: str
    source: str
    start: int
    stop: int
    number: int = 0

    @property
    def split(self) -> str:
        """train, dev or test."""
        return self.folder.rpartition("/")[2]


class Report:
    """What happened to a piece: what was left out as bad, and what else is worth saying; each with its first place."""

    def __init__(self) -> None:
        self.bad: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    def leave_out(self, bad: BadPicture, place: str, count: int = 1) -> None:
        """Count what cannot be used, a picture or all of a sample; too many of them stop the conversion."""
        self.bad[bad.reason] += count
        self.first.setdefault(bad.reason, f"{place}: {bad.detail}")

    def note(self, what: str, place: str, count: int = 1) -> None:
        """Count something that is as it is in the source."""
        if count:
            self.notes[what] += count
            self.first.setdefault(what, place)


@dataclass(frozen=True)
class Work:
    """What a format can see of a conversion.

    Attributes:
        folder: of the conversion's own files; derived sources are written there.
        lines: surveyed sources by name.
        report: of the piece at hand.
        memory: ids of the documents; None while they are being converted.
        rows_per_shard: how many rows of a source a piece has.
    """

    folder: Path
    lines: dict[str, Lines]
    report: Report
    memory: MemoryIds | None
    rows_per_shard: int

    def read(self, piece: Piece) -> Iterator[tuple[int, str, str]]:
        """Number, text and place of the lines of a piece."""
        lines = self.lines[piece.source]
        for chunk in range(piece.start, piece.stop):
            for number, text in lines.read(chunk):
                yield number, text, lines.place(number)

    def pieces_of(self, folder: str, source: str) -> list[Piece]:
        """A piece for every chunk of a source that has lines."""
        return [Piece(folder, source, i, i + 1) for i in range(len(self.lines[source].cuts))]


class Format(ABC):
    """A format; subclasses are frozen dataclasses of options.

    Attributes:
        name: as on the command line.
        summary: one line for ``--help``.
        rows_per_shard: lines or rows a shard is made of, unless the user says otherwise.
        shard_a_file: whether a shard is made of each file of the source, whatever it holds.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    rows_per_shard: ClassVar[int] = 100_000
    shard_a_file: ClassVar[bool] = False

    @abstractmethod
    def sources(self) -> list[SourceFile]:
        """The files that are read by lines."""

    def stamps(self) -> dict[str, Any]:
        """What else the pieces are cut from, as JSON: a conversion is only gone on with while it is the same.

        Pictures of a folder are not in it; each piece keeps the stamps of its own (`data.formats.stamps`).
        """
        return {}

    def derive(self, work: Work) -> list[SourceFile]:
        """Sources that have to be made of others first, such as the contexts that questions carry, each once.

        The files are written into ``work.folder``; done ones are left as they are.
        """
        return []

    @abstractmethod
    def pieces(self, work: Work) -> list[Piece]:
        """The work, documents first; shards are numbered in this order."""

    @abstractmethod
    def read(self, piece: Piece, work: Work) -> Iterator[Item]:
        """What stands in a piece of the sources.

        Raises:
            ValueError: what stands there is not of this format; the message names file and line.
        """

    def columns(self, work: Work) -> dict[str, str]:
        """The column of each role, of a format that finds them by their names: for the user to look at."""
        return {}

    def place(self, piece: Piece, number: int, work: Work) -> str:
        """Where item ``number`` of a piece's source stands, for messages."""
        return work.lines[piece.source].place(number)

    @classmethod
    def add_options(cls, parser: argparse._ActionsContainer) -> None:
        """A flag for every field."""
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            default = None if required else _default(field)
            given = {"default": default, **field.metadata["argparse"]}
            if isinstance(default, bool):
                given["action"] = "store_true"
            parser.add_argument(
                f"--{field.name.replace('_', '-')}", required=required, help=field.metadata["help"], **given
            )

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Format:
        """The format with the options given."""
        values = {field.name: getattr(options, field.name) for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})

    def describe(self) -> dict[str, Any]:
        """The options as JSON, to recognise a conversion by."""
        return {name: _plain(value) for name, value in vars(self).items()}


def split_sources(folder: str, files: Mapping[str, Sequence[Path]], *, array: str | None = None) -> list[SourceFile]:
    """Sources "questions/train-0" and so on for the files of each split."""
    return [
        SourceFile(f"{folder}/{split}-{i}", path, array)
        for split, given in files.items()
        for i, path in enumerate(given)
    ]


def split_pieces(work: Work, folder: str) -> list[Piece]:
    """Pieces of the sources that `split_sources` named."""
    return [
        piece
        for split in SPLITS
        for name in work.lines
        if name.startswith(f"{folder}/{split}-")
        for piece in work.pieces_of(f"{folder}/{split}", name)
    ]


def require(given: bool, message: str) -> None:
    """ValueError with a message unless something is given."""
    if not given:
        raise ValueError(message)


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
