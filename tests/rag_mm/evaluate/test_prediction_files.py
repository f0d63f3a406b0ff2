"""Every mistake of a file is named by file, line and field."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_mm.evaluate.prediction_files import FileError, by_id, is_jsonl, read_json, read_jsonl, read_lines


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("", "f.jsonl is empty"),
        (" \n\n", "f.jsonl is empty"),
        ('{"id": 1}\n{"id": }', r"f\.jsonl:2: no valid JSON at column 8"),
        ('{"id": 1}\n\n[1]', r"f\.jsonl:3: \[1\] where a JSON object is expected"),
        (b'{"id": 1}\n{"id": "\xff"}', r"f\.jsonl:2: byte 0xff is no UTF-8"),
    ],
)
def test_jsonl_mistakes(tmp_path: Path, contents: str | bytes, message: str) -> None:
    with pytest.raises(FileError, match=message):
        list(read_jsonl(write(tmp_path / "f.jsonl", contents)))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="does not exist"):
        list(read_lines(tmp_path / "nowhere"))
    with pytest.raises(FileError, match="cannot be read"):
        list(read_lines(tmp_path))


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ('[{"a": 1},\n {"a": 2},\n 3]', r"f\.json:3: \[2\] is 3; it must be an object"),
        ('[{"a": 1}\n {"a": 2}]', r"f\.json:2: no valid JSON: '\{' where ',' or '\]' is expected"),
        ('{"x": [{"a": 1},\n 7]}', r"f\.json:2: x\[1\] is 7"),
        ('{"x": 1,\n "y" 2}', r"f\.json:2: no valid JSON"),
        ('[{"a": 1}]\n[]', r"f\.json:2: there is more text"),
        ('[{"a": 1}', r"f\.json:1: no valid JSON: '' where"),
        ("7", "a JSON array or object is expected"),
        ('{"a": tru}', r"f\.json:1: no valid JSON at column 7"),
    ],
)
def test_json_mistakes(tmp_path: Path, contents: str, message: str) -> None:
    with pytest.raises(FileError, match=message):
        read_json(write(tmp_path / "f.json", contents))


def test_records_know_their_lines(tmp_path: Path) -> None:
    text = (
        '\ufeff{"info": {"n": 1},\n "annotations": [\n  {"id": 1},\n\n  {"id": 2,\n   "answer": 3}\n ],\n "empty": []}'
    )
    file = read_json(write(tmp_path / "f.json", text))
    assert [(r.line, r.where) for r in file.array("annotations")] == [(3, "annotations[0]"), (5, "annotations[1]")]
    assert file.values == {"info": {"n": 1}} and file.records["empty"] == []
    with pytest.raises(FileError, match=r"f\.json:5 \(annotations\[1\]\): field answer is 3; it must be text"):
        file.array("annotations")[1].text("answer")
    with pytest.raises(
        FileError, match=r"a field 'images' with a list of objects is expected; the file holds 'annotations'"
    ):
        file.array("images")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    ),
    st.sampled_from([None, 0, 2]),
)
def test_what_is_read_is_what_json_reads(
    tmp_path_factory: pytest.TempPathFactory, value: object, indent: int | None
) -> None:
    path = tmp_path_factory.mktemp("json") / "f.json"
    for whole in ([{"x": value}, {}], {"list": [{"x": value}], "x": {"y": value}}):
        path.write_text(json.dumps(whole, indent=indent, ensure_ascii=False), encoding="utf-8", errors="surrogatepass")
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return  # a lone surrogate, which no file holds
        file = read_json(path)
        back = {name: [dict(r.values) for r in records] for name, records in file.records.items()} | file.values
        assert (back[""] if isinstance(whole, list) else back) == whole


@pytest.mark.parametrize(
    ("line", "call", "message"),
    [
        ('{"a": 1}', lambda r: r.text("b", "c"), "field b or c is missing; the fields there are: a"),
        ('{"a": null}', lambda r: r.text("a"), "field a is missing"),
        ('{"a": 1}', lambda r: r.text("a"), "field a is 1; it must be text"),
        ('{"a": true}', lambda r: r.id("a"), "field a is True; it must be an identifier"),
        ('{"a": 1.5}', lambda r: r.id("a"), "field a is 1.5; it must be an identifier"),
        ('{"a": "  "}', lambda r: r.id("a"), "must be an identifier"),
        ('{"a": []}', lambda r: r.texts("a"), "a list of texts, at least one"),
        ('{"a": ["x", 1]}', lambda r: r.texts("a"), "a list of texts"),
        ('{"a": [1]}', lambda r: r.objects("a"), "a list of objects"),
        ('{"a": NaN}', lambda r: r.number("a"), "field a is nan; it must be a finite number"),
        ('{"a": true}', lambda r: r.number("a"), "must be a finite number"),
    ],
)
def test_fields(tmp_path: Path, line: str, call, message: str) -> None:  # type: ignore[no-untyped-def]
    (record,) = read_jsonl(write(tmp_path / "f.jsonl", f"\n{line}\n"))
    with pytest.raises(FileError, match=rf"f\.jsonl:2: .*{message}"):
        call(record)


def test_fields_that_are_right(tmp_path: Path) -> None:
    (r,) = read_jsonl(
        write(tmp_path / "f.jsonl", '{"id": 7, "name": " x ", "one": "a", "many": ["a", "b"], "n": 2}\r\n')
    )
    assert (r.id("id"), r.id("name"), r.texts("one"), r.texts("many"), r.number("n")) == (
        "7",
        "x",
        ("a",),
        ("a", "b"),
        2.0,
    )
    assert r.has("nothing", "id") and not r.has("nothing")


def test_an_id_twice_is_an_error_with_both_lines(tmp_path: Path) -> None:
    records = list(read_jsonl(write(tmp_path / "f.jsonl", '{"id": 1}\n{"id": 2}\n{"id": "1"}')))
    with pytest.raises(FileError, match=r"f\.jsonl:3: id '1' occurs twice; the first is at line 1"):
        by_id(((r.id("id"), r, r) for r in records), what="predictions")
    with pytest.raises(FileError, match="there are no predictions"):
        by_id((), what="predictions")


def test_which_files_are_jsonl(tmp_path: Path) -> None:
    assert is_jsonl(write(tmp_path / "a.jsonl", '{"id": 1}'))
    assert is_jsonl(write(tmp_path / "b.json", '{"id": 1}\n{"id": 2}'))
    assert not is_jsonl(write(tmp_path / "c.json", '{"id": 1}\n'))
    assert not is_jsonl(write(tmp_path / "d.json", '[{"id": 1},\n{"id": 2}]'))
    assert not is_jsonl(write(tmp_path / "e.run", "q Q0 d 1 1.0 x\nq Q0 e 2 0.5 x"))
