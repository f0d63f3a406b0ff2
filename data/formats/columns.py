"""Rows of any table: which column plays which role, and what a row then is.

Roles that are not given by ``--column ROLE=NAME`` are guessed from the usual names, and the columns of
all roles are printed and kept in ``dataset.json``.
What a row becomes follows from the roles it has: with a ``question`` it is a question (with its picture, if any); with
a ``title`` or ``text`` it is a document; a picture with a ``caption`` and no question is a document and, for each of
its captions, a pair. Columns without a role are kept in meta.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data.document_store import Document
from data.formats.rows import Row
from data.samples import Pair, Sample

USUAL = {
    "id": ("id", "_id", "key", "question_id", "uid"),
    "image": ("image", "file_name", "filename", "image_path", "path", "jpg", "png"),
    "caption": ("caption", "captions", "alt_text"),
    "question": ("question", "query"),
    "answers": ("answers", "answer"),
    "gold": ("gold", "positive_ids"),
    "negatives": ("hard_negatives", "negative_ids"),
    "forbidden": ("forbidden",),
    "title": ("title",),
    "text": ("text", "passage", "contents"),
    "split": ("split",),
}
# What of a row is a question's, or a document's, and not its meta's.
ASKED = ("id", "question", "answers", "gold", "negatives", "forbidden")
TOLD = ("id", "title", "text", "caption")
SPLIT_OF = {
    "train": "train",
    "training": "train",
    "validation": "dev",
    "valid": "dev",
    "val": "dev",
    "dev": "dev",
    "test": "test",
}


@dataclass(frozen=True)
class Roles:
    """The column of each role that a table has one for."""

    columns: dict[str, str]

    @classmethod
    def find(cls, names: Sequence[str], given: Sequence[str], where: str) -> Roles:
        """The roles of columns, those given first.

        Raises:
            ValueError: a role or a column does not exist, or the columns make nothing.
        """
        columns: dict[str, str] = {}
        for text in given:
            role, equals, column = text.partition("=")
            if not equals or role not in USUAL:
                raise ValueError(f"--column is {text!r}; write ROLE=NAME with a role of {', '.join(USUAL)}")
            if column and column not in names:
                raise ValueError(f"--column {role} is {column!r}; {where} has the columns {', '.join(names)}")
            columns[role] = column  # an empty one: no column has this role
        for role, usual in USUAL.items():
            if role not in columns:
                columns[role] = next((n for n in usual if n in names and n not in columns.values()), "")
        found = cls({role: column for role, column in columns.items() if column})
        if not (found.asks or found.tells):
            raise ValueError(
                f"{where} has the columns {', '.join(names)}; none is a question, title, text or captioned picture: "
                "name them with --column ROLE=NAME"
            )
        return found

    @property
    def asks(self) -> bool:
        """Whether rows are questions."""
        return "question" in self.columns

    @property
    def tells(self) -> bool:
        """Whether rows are documents."""
        return not self.asks and ("title" in self.columns or "text" in self.columns or "image" in self.columns)

    @property
    def captions(self) -> bool:
        """Whether rows are pairs as well."""
        return self.tells and "caption" in self.columns

    def row_id(self, row: Row, default: str) -> str:
        """The row's own id, or the default."""
        return row.id(self.columns["id"]) if "id" in self.columns else default

    def _rest(self, row: Row) -> dict[str, Any]:
        """What has no role, and the name of the picture where the table has one."""
        name = row.values.get(self.columns.get("image", ""))
        roles = ASKED if self.asks else TOLD
        dropped = [column for role, column in self.columns.items() if role in roles]
        if not isinstance(name, str):
            dropped.append(self.columns.get("image", ""))
        return {column: value for column, value in row.values.items() if column not in dropped}

    def question(self, row: Row, name: str, image: bytes | None) -> Sample:
        """A row as a question."""
        return Sample(
            id=self.row_id(row, name),
            question=row.text(self.columns["question"]),
            answers=tuple(self._texts(row, "answers")),
            kind="name" if image is None else "picture",
            field="",
            subject="",
            gold=tuple(self._texts(row, "gold")),
            image=image,
            hard_negatives=tuple(self._texts(row, "negatives")),
            forbidden=tuple(self._texts(row, "forbidden")),
            meta=self._rest(row),
        )

    def document(self, row: Row, name: str, image: bytes | None, *, captioned: bool) -> Document:
        """A row as a document."""
        text = self._one(row, "text")
        if captioned:
            text = "\n".join([text, *self._texts(row, "caption")]).strip("\n")
        title = " ".join(self._one(row, "title").split())
        return Document(self.row_id(row, name), title, {}, image, self._rest(row), text)

    def pairs(self, row: Row, name: str) -> list[Pair]:
        """The captions of a row, each a pair."""
        document, captions = self.row_id(row, name), self._texts(row, "caption")
        ids = [document] if len(captions) == 1 else [f"{document}:{i}" for i in range(len(captions))]
        return [Pair(i, text, None, (document,)) for i, text in zip(ids, captions, strict=True)]

    def _one(self, row: Row, role: str) -> str:
        return row.text(self.columns[role], "") if role in self.columns else ""

    def _texts(self, row: Row, role: str) -> list[str]:
        """The texts of a column: one, a list, or SQuAD's ``{"text": [...]}``."""
        if role not in self.columns:
            return []
        name = self.columns[role]
        value: Any = row.get(name)
        if isinstance(value, dict) and isinstance(value.get("text"), list):
            value = value["text"]
        if value is None or value == "":
            return []
        if isinstance(value, str | int) and not isinstance(value, bool):
            return [str(value)]
        if isinstance(value, list) and all(isinstance(v, str | int) and not isinstance(v, bool) for v in value):
            return list(dict.fromkeys(map(str, value)))
        return row.fail(f"field {name!r} is {str(value)[:40]!r}; it must be text or a list of texts")
