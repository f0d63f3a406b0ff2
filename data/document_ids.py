"""The ids of a store as a sequence, for tens of millions of them: nothing is held but what edits changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy

from data.document_table import DocumentTable


class DocumentIds(Sequence[str]):
    """All ids at one edit: those of the shards in their order, without the ``hidden``, then the ``added``."""

    def __init__(self, table: DocumentTable, *, hidden: Sequence[str] = (), added: Sequence[str] = ()) -> None:
        self._table, self._added = table, tuple(added)
        self._hidden = numpy.sort(table.find(list(hidden)))
        self._shift = self._hidden - numpy.arange(len(self._hidden))  # ids before each hidden one

    @property
    def _num_base(self) -> int:
        return len(self._table) - len(self._hidden)

    def __len__(self) -> int:
        return self._num_base + len(self._added)

    @overload
    def __getitem__(self, i: int) -> str: ...

    @overload
    def __getitem__(self, i: slice) -> list[str]: ...

    def __getitem__(self, i: int | slice) -> str | list[str]:
        places = range(len(self))[i]
        return self._id(places) if isinstance(places, int) else [self._id(place) for place in places]

    def _id(self, place: int) -> str:
        if place >= self._num_base:
            return self._added[place - self._num_base]
        return self._table.id(place + int(numpy.searchsorted(self._shift, place, side="right")))

    def __iter__(self) -> Iterator[str]:
        hidden = iter([*self._hidden.tolist(), -1])
        gone = next(hidden)
        for position, document_id in enumerate(self._table.ids()):
            if position == gone:
                gone = next(hidden)
            else:
                yield document_id
        yield from self._added

    def __contains__(self, document_id: object) -> bool:
        if not isinstance(document_id, str):
            return False
        position = int(self._table.find([document_id])[0])
        return document_id in self._added or (position >= 0 and position not in self._hidden)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} document ids>"
