"""Any data set that ``datasets`` loads: a folder it saved, files of parquet, json, csv or arrow, or a name on the hub.

Rows are what `data.formats.columns` says. Splits keep their names (validation is dev); others are assigned with
``--splits``. Pictures are passed on as the bytes they are stored as, never decoded and encoded again. Code that a data
set brings is not run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from data.formats import pictures, stamps
from data.formats.columns import SPLIT_OF, Roles
from data.formats.format import SPLITS, Format, Item, Piece, Work, option
from data.formats.lines import SourceFile
from data.formats.pictures import BadPicture
from data.formats.rows import Row

BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".arrow": "arrow"}


@dataclass(frozen=True, kw_only=True)
class Hub(Format):
    """A data set of the `datasets` library."""

    name: ClassVar[str] = "datasets"
    summary: ClassVar[str] = "any data set that `datasets` loads: a local folder or file, or a name on the hub"
    rows_per_shard: ClassVar[int] = 20_000

    dataset: str = option("folder, file or name on the hub", metavar="NAME")
    config: str | None = option("configuration of a data set on the hub", default=None)
    revision: str | None = option("commit of a data set on the hub", default=None)
    splits: tuple[str, ...] = option(
        "splits to take, with what they are here: train=train dev=validation (default: by their names)",
        default=(), nargs="+", metavar="SPLIT=NAME",
    )  # fmt: skip
    column: tuple[str, ...] = option(
        "which column is what: id, image, caption, question, answers, gold, negatives, forbidden, title, text",
        default=(), nargs="+", metavar="ROLE=NAME",
    )  # fmt: skip
    captioned: bool = option("documents hold their captions as text, too", default=False)

    def sources(self) -> list[SourceFile]:
        return []

    def stamps(self) -> dict[str, Any]:
        path = Path(self.dataset)
        if path.exists():
            return stamps.stamps([path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()))
        loaded = _load(self.dataset, self.config, self.revision)
        return {f"{self.dataset}, split {name}": rows._fingerprint for name, rows in loaded.items()}

    def _splits(self) -> dict[str, str]:
        """Name in the source of each split."""
        there = list(_load(self.dataset, self.config, self.revision))
        found: dict[str, str] = {}
        for text in self.splits:
            split, equals, name = text.partition("=")
            if not equals or split not in SPLITS:
                raise ValueError(f"--splits is {text!r}; write SPLIT=NAME with a split of {', '.join(SPLITS)}")
            if name not in there:
                raise ValueError(f"--splits {split} is {name!r}; {self.dataset} has {', '.join(there)}")
            found[split] = name
        if not self.splits:
            for name in there:
                if name in SPLIT_OF and SPLIT_OF[name] not in found:
                    found[SPLIT_OF[name]] = name
        if not found or (not self.splits and len(found) < len(there)):
            raise ValueError(
                f"{self.dataset} has the splits {', '.join(there)}; say which is what: --splits train=NAME"
            )
        return found

    def _roles(self) -> Roles:
        loaded = _load(self.dataset, self.config, self.revision)
        if any(text.startswith("split=") for text in self.column):
            raise ValueError("--column split names a column, but rows of this format are in the splits of --splits")
        return Roles.find(next(iter(loaded.values())).column_names, ("split=", *self.column), self.dataset)

    def columns(self, work: Work) -> dict[str, str]:
        return self._roles().columns

    def pieces(self, work: Work) -> list[Piece]:
        roles, loaded = self._roles(), _load(self.dataset, self.config, self.revision)
        parts: list[tuple[str, bool]] = [
            ("documents", roles.tells),
            ("questions", roles.asks),
            ("pairs", roles.captions),
        ]
        found = []
        for part, wanted in parts:
            for split, name in self._splits().items() if wanted else ():
                size = len(loaded[name])
                folder = part if part == "documents" else f"{part}/{split}"
                starts = range(0, size, work.rows_per_shard)
                found += [Piece(folder, name, i, min(size, i + work.rows_per_shard)) for i in starts]
        return found

    def place(self, piece: Piece, number: int, work: Work) -> str:
        return f"{self.dataset}, split {piece.source}, row {number}"

    def read(self, piece: Piece, work: Work) -> Iterator[Item]:
        roles = self._roles()
        rows = _load(self.dataset, self.config, self.revision)[piece.source]
        image_column, path = roles.columns.get("image"), Path(self.dataset)
        folder = path.parent if path.is_file() else path
        if piece.folder.startswith("pairs") and image_column is not None:
            rows = rows.remove_columns(image_column)
        for number in range(piece.start, piece.stop):
            place, name = self.place(piece, number, work), f"{piece.source}-{number}"
            row = Row(rows[number], place)
            if piece.folder.startswith("pairs"):
                for pair in roles.pairs(row, name):
                    yield number, pair
                continue
            image = None if image_column is None else _picture(row, image_column, folder)
            if isinstance(image, BadPicture):
                work.report.leave_out(image, place)
            elif piece.folder == "documents":
                yield number, roles.document(row, name, image, captioned=self.captioned)
            else:
                yield number, roles.question(row, name, image)


def _picture(row: Row, column: str, folder: Path) -> bytes | BadPicture | None:
    value: Any = row.get(column)
    if isinstance(value, dict):  # how an undecoded picture is stored
        data, value = value.get("bytes"), value.get("path")
        if data is not None:
            return pictures.check(data, row.place)
    if isinstance(value, bytes):
        return pictures.check(value, row.place)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        row.fail(f"field {column!r} is {str(value)[:40]!r}; it must be a picture or the name of one")
    path = Path(value)
    return pictures.read(path.parent if path.is_absolute() else folder, path.name if path.is_absolute() else value)


@functools.lru_cache(maxsize=2)
def _load(name: str, config: str | None, revision: str | None) -> Any:
    """A dict of splits; pictures stay encoded.

    Raises:
        ValueError: there is none, or `datasets` cannot read it.
    """
    import datasets

    datasets.disable_progress_bars()
    path = Path(name)
    try:
        if path.is_dir() and ((path / "dataset_dict.json").exists() or (path / "state.json").exists()):
            loaded = datasets.load_from_disk(name)
        elif path.exists():
            loaded = _load_files(path)
        else:
            loaded = datasets.load_dataset(name, config, revision=revision)
    except Exception as error:  # whatever a reader of foreign files raises is news to the user, not a fault of ours
        reason = " ".join(f"{error}: {error.__cause__ or ''}".split()).rstrip(": ")[:300]
        raise ValueError(f"--dataset is {name}, which `datasets` cannot load: {reason}") from None
    if not isinstance(loaded, dict):
        loaded = datasets.DatasetDict({"train": loaded})
    for split, rows in loaded.items():
        for column, feature in rows.features.items():
            if isinstance(feature, datasets.Image):
                rows = rows.cast_column(column, datasets.Image(decode=False))
        loaded[split] = rows
    return loaded


def _load_files(path: Path) -> Any:
    """Plain files: those of a folder by split, where their names begin with one, or a single file."""
    import datasets

    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in BUILDERS)
    kinds = {BUILDERS[p.suffix] for p in files if p.suffix in BUILDERS}
    if len(kinds) != 1:
        raise ValueError(f"it must hold files of one kind of {', '.join(BUILDERS)}, and holds {len(kinds)} kinds")
    by_split: dict[str, list[str]] = {}
    for file in files:
        name = next(
            (s for s in SPLIT_OF if file.stem == s or file.stem.startswith((f"{s}-", f"{s}_", f"{s}."))), "train"
        )
        by_split.setdefault(name, []).append(str(file))
    return datasets.load_dataset(kinds.pop(), data_files=by_split)
