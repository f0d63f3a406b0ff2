"""Files as numbered lines: whatever the ends of lines and blocks, a chunk holds the lines that `splitlines` says."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.formats import lines as module
from data.formats.id_tables import LineTable, MemoryIds, hashes_of
from data.formats.lines import SourceFile, survey, top_level
from data.formats.rows import json_row, table_row

TEXT = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=8), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(TEXT, st.integers(1, 7), st.integers(3, 40), st.booleans(), st.booleans())
def test_chunks_are_the_lines(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], every: int, block: int, windows: bool, ended: bool
):
    folder = tmp_path_factory.mktemp("lines")
    end = "\r\n" if windows else "\n"
    path = folder / "file.txt"
    path.write_bytes((end.join([*texts, "last"]) + (end if ended else "")).encode())
    with mock.patch.object(module, "BLOCK", block):
        lines = survey(SourceFile("file", path), folder, every=every)
    right = [(i, text) for i, text in enumerate([*texts, "last"]) if text.strip()]
    assert lines.num_lines == len(texts) + 1 and len(lines.cuts) == -(-lines.num_lines // every)
    right[0] = (right[0][0], right[0][1].removeprefix("\ufeff")) if right[0][0] == 0 else right[0]
    assert [line for chunk in range(len(lines.cuts)) for line in lines.read(chunk)] == right
    for chunk in range(len(lines.cuts)):
        assert all(chunk * every <= number < (chunk + 1) * every for number, _ in lines.read(chunk))
    assert lines.place(3) == f"{path}, line 4"


def test_arrays_gzip_and_byte_order_marks_are_lines_too(tmp_path: Path):
    rows = [{"a": 1.5, "b": "line\nbreak \u2028"}, {"a": 10**20, "c": None}]
    (tmp_path / "a.json").write_text(json.dumps({"head": "x", "deep": {"rows": rows}}))
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    (tmp_path / "c.jsonl").write_text("\ufeff" + "".join(json.dumps(row) + "\r\n" for row in rows))
    (tmp_path / "d.json").write_text("  " + json.dumps(rows, indent=2))
    sources = [
        SourceFile("a", tmp_path / "a.json", "deep.rows"), SourceFile("b", tmp_path / "b.json.gz", "auto"),
        SourceFile("c", tmp_path / "c.jsonl", "auto"), SourceFile("d", tmp_path / "d.json", "auto"),
    ]  # fmt: skip
    for source, place in zip(sources, ("deep.rows[1]", "[1]", "line 2", "[1]"), strict=True):
        lines = survey(source, tmp_path, every=1)
        found = [json_row(text, "here").values for chunk in range(2) for _, text in lines.read(chunk)]
        assert found == rows and lines.place(1) == f"{source.path}, {place}"
        assert survey(source, tmp_path, every=1) == lines  # as it was kept
    assert top_level(tmp_path / "a.json", "head") == "x" and top_level(tmp_path / "a.json", "tail") is None


def test_lines_by_key(tmp_path: Path):
    (tmp_path / "t.tsv").write_text("key\tn\n" + "".join(f"k{i % 5}\t{i}\n" for i in range(40)))
    lines = survey(SourceFile("t", tmp_path / "t.tsv", header=True), tmp_path, every=7)

    def key(text: str, place: str) -> str:
        return table_row(text, ("key", "n"), place).text("key")

    for _ in range(2):  # made, then opened
        table = LineTable(lines, tmp_path, "t", key)
        assert [text for _, text, _ in table.lines_of("k3")] == [f"k3\t{i}" for i in range(3, 40, 5)]
        assert next(place for *_, place in table.lines_of("k3")) == f"{tmp_path}/t.tsv, line 5"
        assert list(table.lines_of("k7")) == []


def test_equal_hashes_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Were two keys to have one hash, each would still find its own lines."""
    monkeypatch.setattr("data.formats.id_tables.hash_of", lambda text: 7)
    (tmp_path / "t.txt").write_text("a\nb\na\n")
    lines = survey(SourceFile("t", tmp_path / "t.txt"), tmp_path, every=9)
    table = LineTable(lines, tmp_path, "t", lambda text, place: text)
    assert [number for number, *_ in table.lines_of("a")] == [0, 2]


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(max_size=6), st.integers(0, 3), max_size=20), st.text(max_size=6))
def test_documents_of_the_memory(tmp_path_factory: pytest.TempPathFactory, documents: dict[str, int], other: str):
    import numpy

    folder = tmp_path_factory.mktemp("ids")
    MemoryIds.write(folder, hashes_of(documents), numpy.array(list(documents.values()), numpy.int32))
    memory = MemoryIds(folder)
    for name, passages in documents.items():
        assert memory.ids(name) == ([f"{name}#{i}" for i in range(passages)] or [name])
    assert memory.ids(other) == [] or other in documents


@settings(max_examples=200)
@given(st.lists(st.text(max_size=8), min_size=2, max_size=4))
def test_a_quoted_cell_is_read_as_the_csv_module_wrote_it(cells: list[str]):
    import csv
    import io

    out = io.StringIO()
    csv.writer(out, delimiter="\t", lineterminator="").writerow(cells)
    line = out.getvalue()
    if "\n" in line or "\r" in line or "\0" in line:
        return  # cells do not go on over lines
    row = table_row(line, [str(i) for i in range(len(cells))], "here")
    assert list(row.values.values()) == cells


def test_a_cell_may_be_as_long_as_an_article():
    text = "word " * 100_000
    assert table_row(f'1\t"{text}"\tT', ("id", "text", "title"), "here").text("text") == text
