"""One object of a user's file, read field by field: what is asked for is checked, what is not asked for is kept."""

from __future__ import annotations

import csv
import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

_REQUIRED: Any = object()
csv.field_size_limit(1 << 30)  # of the whole process; the usual 128 KiB are less than an article of Wikipedia


class Row:
    """Named values and the place they were found at, which every complaint begins with.

    Reading a field marks it as used; `rest` gives those that nobody asked for.
    """

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        self.values, self.place = values, place
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, name: str) -> Any:
        """The raw value, None if absent."""
        self._used.add(name)
        return self.values.get(name)

    def rest(self, *dropped: str) -> dict[str, Any]:
        """The fields that were not read, but for those that are dropped knowingly."""
        return {name: value for name, value in self.values.items() if name not in self._used | set(dropped)}

    def fail(self, message: str) -> Any:
        """Raise a ValueError that begins with the place."""
        raise ValueError(f"{self.place}: {message}")

    def text(self, name: str, default: Any = _REQUIRED) -> str:
        """A text."""
        return self._checked(name, default, str, "text")

    def line(self, name: str, default: Any = _REQUIRED) -> str:
        """A text brought to one line: white space of any kind is one blank."""
        return " ".join(self.text(name, default).split())

    def id(self, name: str, default: Any = _REQUIRED) -> str:
        """An id: a non-empty text or a whole number."""
        value = self._checked(name, default, (str, int), "text or a whole number")
        return str(value) if str(value) else self.fail(f"field {name!r} is empty; it must be an id")

    def number(self, name: str, default: Any = _REQUIRED) -> int:
        """A whole number."""
        return self._checked(name, default, int, "a whole number")

    def texts(self, name: str, default: Any = _REQUIRED) -> list[str]:
        """A list of texts."""
        values = self._checked(name, default, list, "a list of texts")
        for i, value in enumerate(values):
            if not isinstance(value, str):
                self.fail(f"field {name}[{i}] is {_shown(value)}; it must be text")
        return list(values)

    def rows(self, name: str, default: Any = _REQUIRED) -> list[Row]:
        """A list of objects."""
        values = self._checked(name, default, list, "a list of objects")
        for i, value in enumerate(values):
            if not isinstance(value, dict):
                self.fail(f"field {name}[{i}] is {_shown(value)}; it must be an object")
        return [Row(value, f"{self.place}, {name}[{i}]") for i, value in enumerate(values)]

    def _checked(self, name: str, default: Any, kinds: Any, what: str) -> Any:
        value = self.get(name)
        if value is None:
            if default is _REQUIRED:
                near = difflib.get_close_matches(name, self.values, n=1, cutoff=0.7)
                hint = f"; did you mean {near[0]!r}?" if near else f" (there are: {', '.join(self.values)})"
                self.fail(f"field {name!r} is missing{hint}")
            return default
        if not isinstance(value, kinds) or isinstance(value, bool):
            self.fail(f"field {name!r} is {_shown(value)}; it must be {what}")
        return value


def json_row(line: str, place: str) -> Row:
    """The object on a line of JSON; ValueError if there is none, or it names a key twice."""
    try:
        values = json.loads(line, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}, column {error.colno}: not valid JSON: {error.msg}") from None
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    except RecursionError:
        raise ValueError(f"{place}: nested too deeply") from None
    if "\\u" in line and not _encodable(values):
        raise ValueError(f"{place}: a text holds half a character (a lone surrogate)")
    if not isinstance(values, dict):
        raise ValueError(f"{place}: {_shown(values)}; it must be an object {{...}}")
    return Row(values, place)


def table_row(line: str, columns: Sequence[str], place: str, *, separator: str = "\t", quoted: bool = True) -> Row:
    """The cells of a line by column; ValueError if their number is another.

    Args:
        quoted: whether a cell may stand in double quotes, those in it doubled (csv); else quotes are letters.
    """
    if quoted:
        try:
            cells = next(csv.reader([line], delimiter=separator), [])
        except csv.Error as error:
            raise ValueError(f"{place}: {error}") from None
    else:
        cells = line.split(separator)
    if len(cells) != len(columns):
        raise ValueError(f"{place}: {len(cells)} cells; there must be {len(columns)} ({', '.join(columns)})")
    return Row(dict(zip(columns, cells, strict=True)), place)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"field {twice!r} occurs twice")
    return found


def _encodable(values: Any) -> bool:
    """Whether all texts can be written as UTF-8; JSON can spell some that cannot."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 40 else f"{text[:40]}..."
