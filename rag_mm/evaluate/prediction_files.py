"""Files that people bring, read record by record, so that a mistake is named by file, line and field.

JSON arrays, and arrays inside one JSON object, are walked element by element with the position of each, because "line
12034, field answer" can be mended and "list indices must be integers" cannot. The whole text is held in memory and
parsed: annotations of the size of VQA's validation set (214,354 questions, 170 MB) take 1.3 GB.
"""

from __future__ import annotations

import bisect
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

_SPACE = re.compile(r"[ \t\r\n]*")
Item = TypeVar("Item")


class FileError(ValueError):
    """A user's file is wrong; the message names file, line and field."""


@dataclass(frozen=True)
class Record:
    """One JSON object of a file.

    Attributes:
        path: the file.
        line: where it begins, from 1.
        values: its fields.
        where: place inside the line, such as "annotations[7]", or empty.
    """

    path: Path
    line: int
    values: Mapping[str, Any]
    where: str = ""

    @property
    def place(self) -> str:
        """``file:line``, and the entry where a line holds several."""
        return f"{self.path}:{self.line}" + (f" ({self.where})" if self.where else "")

    def fail(self, message: str) -> NoReturn:
        raise FileError(f"{self.place}: {message}")

    def has(self, *names: str) -> bool:
        """Whether any of these fields is there and not null."""
        return any(self.values.get(name) is not None for name in names)

    def get(self, *names: str) -> tuple[str, Any]:
        """Name and value of the first of these fields that is there and not null."""
        for name in names:
            if self.values.get(name) is not None:
                return name, self.values[name]
        known = ", ".join(map(str, self.values)) or "none"
        self.fail(f"field {' or '.join(names)} is missing; the fields there are: {known}")

    def id(self, *names: str) -> str:
        """An identifier: text or a whole number, as text without spaces around it."""
        name, value = self.get(*names)
        return self.identifier(name, value)

    def identifier(self, name: str, value: Any) -> str:
        """``value`` as an identifier; ``name`` is for the message."""
        if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
            self.fail(f"field {name} is {shown(value)}; it must be an identifier (text or a whole number)")
        return str(value).strip()

    def text(self, *names: str) -> str:
        """A text, possibly empty."""
        name, value = self.get(*names)
        if not isinstance(value, str):
            self.fail(f"field {name} is {shown(value)}; it must be text")
        return value

    def texts(self, *names: str) -> tuple[str, ...]:
        """One text or a list of them, at least one."""
        name, value = self.get(*names)
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not values or not all(isinstance(v, str) for v in values):
            self.fail(f"field {name} is {shown(value)}; it must be a text or a list of texts, at least one")
        return tuple(values)

    def objects(self, *names: str) -> list[Record]:
        """A list of objects, as records of the same line."""
        name, value = self.get(*names)
        if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
            self.fail(f"field {name} is {shown(value)}; it must be a list of objects")
        prefix = f"{self.where}." if self.where else ""
        return [Record(self.path, self.line, v, f"{prefix}{name}[{i}]") for i, v in enumerate(value)]

    def number(self, *names: str) -> float:
        """A finite number."""
        name, value = self.get(*names)
        return self.finite(name, value)

    def finite(self, name: str, value: Any) -> float:
        """``value`` as a finite number; ``name`` is for the message."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.fail(f"field {name} is {shown(value)}; it must be a finite number")
        return float(value)


def shown(value: Any) -> str:
    """A value for a message, cut to a reasonable length."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def by_id(records: Iterable[tuple[str, Record, Item]], *, what: str) -> dict[str, Item]:
    """Items by id, in the order of the file.

    Raises:
        FileError: if an id occurs twice, with both lines; if there is no item.
    """
    found: dict[str, Item] = {}
    places: dict[str, Record] = {}
    for key, record, item in records:
        if key in found:
            record.fail(
                f"id {key!r} occurs twice; the first is at line {places[key].line} {places[key].where}".rstrip()
            )
        found[key], places[key] = item, record
    if not found:
        raise FileError(f"there are no {what}")
    return found


def read_text(path: Path) -> str:
    """The whole file as UTF-8, a byte order mark dropped.

    Raises:
        FileError: if it does not exist, cannot be read, is no UTF-8 (with the line), or is empty.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise FileError(f"{path} does not exist") from None
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise FileError(f"{path}:{line}: byte {raw[error.start]:#04x} is no UTF-8; save the file as UTF-8") from None
    if not text.strip():
        raise FileError(f"{path} is empty")
    return text


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbers and contents of the lines that are not blank."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            yield number, line.rstrip("\r")


def read_jsonl(path: Path) -> Iterator[Record]:
    """The objects of a file with one JSON object a line; blank lines are passed over."""
    for number, line in read_lines(path):
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise FileError(f"{path}:{number}: no valid JSON at column {error.colno}: {error.msg}") from None
        if not isinstance(value, dict):
            raise FileError(f"{path}:{number}: {shown(value)} where a JSON object is expected, one a line")
        yield Record(path, number, value)


@dataclass(frozen=True)
class JsonFile:
    """One JSON value with the line of every record in it.

    Attributes:
        records: by the name of the array that holds them; "" for an array that is the file.
        values: the other fields of an object that is the file.
    """

    path: Path
    records: dict[str, list[Record]]
    values: dict[str, Any]

    def array(self, *names: str) -> list[Record]:
        """The records of the first of these arrays that is there ("" for a file that is an array)."""
        for name in names:
            if name in self.records:
                return self.records[name]
        wanted = " or ".join(
            f"a field {name!r} with a list of objects" if name else "a list of objects" for name in names
        )
        there = ", ".join(map(repr, [*self.records, *self.values])) or "nothing"
        raise FileError(f"{self.path}: {wanted} is expected; the file holds {there}")


def is_jsonl(path: Path) -> bool:
    """Whether a file has one JSON object a line rather than being one JSON value: its first line says."""
    text = read_text(path)
    first = text.lstrip().split("\n", 1)[0]
    try:
        value = json.loads(first)
    except json.JSONDecodeError:
        return path.suffix == ".jsonl"
    if not isinstance(value, dict):
        return path.suffix == ".jsonl"
    return path.suffix == ".jsonl" or bool(text.lstrip()[len(first) :].strip())


def read_json(path: Path) -> JsonFile:
    """A file that is one JSON array of objects, or one object with such arrays as fields.

    Raises:
        FileError: if it is no JSON, or an element of an array of objects is none.
    """
    reader = _Reader(path, read_text(path))
    records: dict[str, list[Record]] = {}
    values: dict[str, Any] = {}
    if reader.peek() == "[":
        records[""] = reader.records("")
    elif reader.peek() == "{":
        for name in reader.fields():
            if reader.peek() == "[" and reader.holds_objects():
                records[name] = reader.records(name)
            else:
                values[name] = reader.value()
    else:
        reader.fail("a JSON array or object is expected")
    reader.end()
    return JsonFile(path, records, values)


class _Reader:
    """Walks through JSON text; arrays of objects are taken apart with the line of each element."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text, self.at = path, text, 0
        self._ends = [match.start() for match in re.finditer("\n", text)]
        self._decoder = json.JSONDecoder()

    def line(self, at: int) -> int:
        return bisect.bisect_left(self._ends, at) + 1

    def fail(self, message: str) -> NoReturn:
        raise FileError(f"{self.path}:{self.line(self.at)}: {message}")

    def peek(self) -> str:
        match = _SPACE.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        return self.text[self.at : self.at + 1]

    def take(self, *marks: str) -> str:
        mark = self.peek()
        if mark not in marks or not mark:
            self.fail(f"no valid JSON: {mark!r} where {' or '.join(map(repr, marks))} is expected")
        self.at += 1
        return mark

    def value(self) -> Any:
        self.peek()
        try:
            value, self.at = self._decoder.raw_decode(self.text, self.at)
        except json.JSONDecodeError as error:
            raise FileError(f"{self.path}:{error.lineno}: no valid JSON at column {error.colno}: {error.msg}") from None
        return value

    def holds_objects(self) -> bool:
        """Whether the array that begins here has an object as its first element, or none at all."""
        match = _SPACE.match(self.text, self.at + 1)
        assert match is not None
        return self.text[match.end() : match.end() + 1] in ("{", "]")

    def records(self, name: str) -> list[Record]:
        found: list[Record] = []
        self.take("[")
        if self.peek() == "]":
            self.at += 1
            return found
        while True:
            self.peek()
            line = self.line(self.at)
            value = self.value()
            if not isinstance(value, dict):
                raise FileError(f"{self.path}:{line}: {name}[{len(found)}] is {shown(value)}; it must be an object")
            found.append(Record(self.path, line, value, f"{name}[{len(found)}]"))
            if self.take(",", "]") == "]":
                return found

    def fields(self) -> Iterator[str]:
        self.take("{")
        if self.peek() == "}":
            self.at += 1
            return
        while True:
            name = self.value() if self.peek() == '"' else self.take('"')
            self.take(":")
            yield name
            if self.take(",", "}") == "}":
                return

    def end(self) -> None:
        if self.peek():
            self.fail("there is more text after the end of the JSON value")
