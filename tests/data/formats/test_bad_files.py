"""Files that are not what they should be: a message with file and place, status 2, and never a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from data import prepare
from data.dataset import Dataset
from tests.data.formats import examples
from tests.data.formats.examples import EXAMPLES

Break = Callable[[Path], object]


def replaced(name: str, old: str, new: str) -> Break:
    def change(root: Path) -> None:
        path = root / name
        text = path.read_text(encoding="utf-8")
        assert text.count(old) >= 1
        path.write_text(text.replace(old, new, 1), encoding="utf-8")

    return change


def appended(name: str, data: bytes) -> Break:
    def change(root: Path) -> None:
        with (root / name).open("ab") as file:
            file.write(data)

    return change


def cut(name: str, end: int) -> Break:
    return lambda root: (root / name).write_bytes((root / name).read_bytes()[:end])


def edited_json(name: str, edit: Callable[[list[dict]], object], key: str | None = None) -> Break:
    def change(root: Path) -> None:
        body = json.loads((root / name).read_text())
        edit(body if key is None else body[key])
        (root / name).write_text(json.dumps(body))

    return change


QUESTIONS = "v2_OpenEnded_mscoco_train2014_questions.json"
ANNOTATIONS = "v2_mscoco_train2014_annotations.json"
KILT = "kilt_knowledgesource.json"

CASES: dict[str, tuple[str, Break, str]] = {
    # lines of JSON
    "missing field": (
        "kilt",
        replaced(KILT, '"wikipedia_title": "Nepal"', '"title": "Nepal"'),
        f"{KILT}, line 2: field 'wikipedia_title' is missing",
    ),
    "near miss": (
        "kilt",
        replaced(KILT, '"wikipedia_title": "Nepal"', '"wikipediatitle": "Nepal"'),
        "did you mean 'wikipediatitle'?",
    ),
    "wrong type": (
        "kilt",
        replaced(KILT, '"wikipedia_title": "A"', '"wikipedia_title": 7'),
        f"{KILT}, line 1: field 'wikipedia_title' is 7; it must be text",
    ),
    "wrong item": ("kilt", replaced(KILT, '"A\\n"', "null"), f"{KILT}, line 1: field text[0] is null; it must be text"),
    "a bool is no id": (
        "kilt",
        replaced("nq-dev-kilt.jsonl", '"d1"', "true"),
        "nq-dev-kilt.jsonl, line 1: field 'id' is true; it must be text or a whole number",
    ),
    "not UTF-8": (
        "kilt",
        appended(KILT, b'{"a": "\xff"}\n'),
        f"{KILT}, line 3: byte 8 of the line (0xff) is not UTF-8",
    ),
    "not JSON": ("kilt", appended(KILT, b"{'a': 1}\n"), f"{KILT}, line 3, column 2: not valid JSON"),
    "not an object": ("kilt", appended(KILT, b"[1]\n"), f"{KILT}, line 3: [1]; it must be an object"),
    "a key twice": ("kilt", appended(KILT, b'{"id": 1, "id": 2}\n'), f"{KILT}, line 3: field 'id' occurs twice"),
    "half a character": (
        "kilt",
        appended(KILT, b'{"wikipedia_id": "5", "wikipedia_title": "\\ud800", "text": []}\n'),
        f"{KILT}, line 3: a text holds half a character",
    ),
    "an id twice": (
        "kilt",
        appended(KILT, b'{"wikipedia_id": "290", "wikipedia_title": "A", "text": []}\n'),
        f"{KILT}, line 3: id '290' occurs already in",
    ),
    "nested": (
        "kilt",
        replaced("nq-train-kilt.jsonl", '"wikipedia_id": "290"', '"wikipedia_id": []'),
        "nq-train-kilt.jsonl, line 1, output[0], provenance[0]: field 'wikipedia_id' is []",
    ),
    "empty file": ("kilt", lambda root: (root / KILT).write_bytes(b""), f"{KILT} is empty"),
    "no file": ("kilt", lambda root: (root / KILT).unlink(), f"{KILT} does not exist"),
    "nested too deeply": ("kilt", appended(KILT, b'{"a":' * 100_000 + b"\n"), f"{KILT}, line 3: nested too deeply"),
    # tables
    "cells": (
        "dpr",
        appended("psgs_w100.tsv", b"5\tonly two\n"),
        "psgs_w100.tsv, line 6: 2 cells; there must be 3 (id, text, title)",
    ),
    "a quote without end": ("dpr", appended("psgs_w100.tsv", b'5\t"open\ttitle\n'), "psgs_w100.tsv, line 6: 2 cells"),
    "only a header": (
        "dpr",
        lambda root: (root / "psgs_w100.tsv").write_text("id\ttext\ttitle\n"),
        "psgs_w100.tsv holds nothing but a header",
    ),
    "header": (
        "dpr",
        replaced("psgs_w100.tsv", "id\ttext\ttitle", "id\tpassage\ttitle"),
        "psgs_w100.tsv, line 2: field 'text' is missing (there are: id, passage, title)",
    ),
    "csv cells": (
        "folder",
        appended("pictures/metadata.csv", b"x.jpg,a\n"),
        "metadata.csv, line 5: 2 cells; there must be 4",
    ),
    "split": (
        "folder",
        replaced("pictures/metadata.csv", "validation", "valuation"),
        "metadata.csv, line 3: split is 'valuation'; allowed are train",
    ),
    # JSON arrays
    "array element": (
        "dpr",
        edited_json("biencoder-nq-train.json", lambda b: b[1].pop("question")),
        "biencoder-nq-train.json, [1]: field 'question' is missing",
    ),
    "in an array": (
        "dpr",
        edited_json("biencoder-nq-train.json", lambda b: b[1]["positive_ctxs"][0].pop("passage_id")),
        "biencoder-nq-train.json, [1], positive_ctxs[0]: field 'passage_id' is missing",
    ),
    "cut off": ("dpr", cut("biencoder-nq-train.json", -40), "biencoder-nq-train.json is not valid JSON after [1]"),
    "named array": (
        "vqa",
        edited_json(QUESTIONS, lambda b: b[2].pop("image_id"), "questions"),
        f"{QUESTIONS}, questions[2]: field 'image_id' is missing",
    ),
    "no array": (
        "vqa",
        lambda root: (root / QUESTIONS).write_text('{"questions": []}'),
        f"{QUESTIONS} holds no list 'questions' with anything in it",
    ),
    "no annotation": (
        "vqa",
        edited_json(ANNOTATIONS, lambda b: b.pop(0), "annotations"),
        f"{QUESTIONS}, questions[2]: question 2002 has 0 annotations; it must have one",
    ),
    "other picture": (
        "vqa",
        edited_json(ANNOTATIONS, lambda b: b[0].update(image_id=1), "annotations"),
        f"{ANNOTATIONS}, annotations[0]: image_id is 1, but 2 in",
    ),
    "a text for two": (
        "fid",
        edited_json("train.json", lambda b: b[1]["ctxs"][0].update(text="x")),
        "train.json, [1], ctxs[0]: passage '3' has another text",
    ),
    "karpathy split": (
        "coco",
        edited_json("dataset_coco.json", lambda b: b[0].update(split="valid"), "images"),
        "dataset_coco.json, images[0]: split is 'valid'; allowed are train, restval, val, test",
    ),
    # judgements
    "unknown query": (
        "beir",
        appended("scifact/qrels/test.tsv", b"nobody\t3\t1\n"),
        "test.tsv, line 3: there is no query 'nobody' in",
    ),
    "unknown document": (
        "beir",
        appended("scifact/qrels/test.tsv", b"q2\tnowhere\t1\n"),
        "test.tsv, line 3: there is no document 'nowhere' in",
    ),
    "score": (
        "beir",
        appended("scifact/qrels/test.tsv", b"q2\t3\thigh\n"),
        "test.tsv, line 3: score is 'high'; it must be a whole number",
    ),
    "judgement cells": (
        "beir",
        appended("scifact/qrels/test.tsv", b"q2 3 1\n"),
        "test.tsv, line 3: 1 cells; there must be 3",
    ),
    # entries
    "entry without a gloss": (
        "wordnet",
        appended("wordnet/data.adv", b"00000500 02 r 01 so 0 000\n"),
        "data.adv, line 3: not an entry as wndb(5WN) describes it (there is no '|' before a gloss): '00000500 02",
    ),
    "entry with fewer words than it says": (
        "wordnet",
        appended("wordnet/data.adv", b"00000500 02 r 02 so 0 000 | to a degree\n"),
        "data.adv, line 3: not an entry as wndb(5WN) describes it (fields are missing or unknown)",
    ),
    "pointer into nothing": (
        "wordnet",
        appended("wordnet/data.adv", b"00000500 02 r 01 so 0 001 \\ 00000011 a 0101 | to a degree\n"),
        "data.adv, line 3: points to 00000011 a, but no entry begins there in",
    ),
    # others
    "token line": (
        "flickr30k-tokens",
        appended("results_20130124.token", b"1.jpg 0 no tab\n"),
        "results_20130124.token, line 11: '1.jpg 0 no tab'",
    ),
    "not a tar": (
        "img2dataset",
        lambda root: (root / "laion/00001.tar").write_bytes(b"x" * 2000),
        "00001.tar is not a readable uncompressed tar: it does not begin with a tar header",
    ),
    "gzip": (
        "wit",
        lambda root: (root / "image_pixels_part-00000.csv.gz").write_bytes(b"\x1f\x8b\x08" + b"x" * 50),
        "image_pixels_part-00000.csv.gz is not a whole gzip file",
    ),
    "an id that is a text": (
        "kilt",
        appended(KILT, json.dumps({"wikipedia_id": "x" * 1200, "wikipedia_title": "A", "text": []}).encode() + b"\n"),
        f"{KILT}, line 3: id 'xxx",
    ),
    "no data set": (
        "datasets",
        lambda root: (root / "saved" / "dataset_dict.json").write_text("{"),
        "which `datasets` cannot load",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_message_and_status(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    name, spoil, message = CASES[case]
    argv = EXAMPLES[name][0](tmp_path)
    spoil(tmp_path)
    assert prepare.main([*argv, "--out", str(tmp_path / "out"), "--vocabulary", "0", "--workers", "1"]) == 2
    error = capfd.readouterr().err
    assert message in error and error.count("\n") == 1 and str(tmp_path) in error
    assert not (tmp_path / "out").exists()


def test_an_id_twice_in_two_shards_is_found_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    argv = examples.kilt(tmp_path)
    appended(KILT, b'{"wikipedia_id": "290", "wikipedia_title": "A", "text": []}\n')(tmp_path)
    assert prepare.main([*argv, "--out", str(tmp_path / "out"), "--rows-per-shard", "1", "--workers", "1"]) == 2
    path = tmp_path / KILT
    assert f"{path}, line 3: the id occurs already in {path}, line 1" in capsys.readouterr().err


def spoil_pictures(root: Path) -> None:
    images = root / "images"
    (images / "train2014" / "COCO_train2014_000000000000.jpg").write_bytes(b"no picture")
    whole = examples.picture(3, size=256)
    (images / "val2014" / "COCO_val2014_000000000001.jpg").write_bytes(whole[: len(whole) // 2])
    (images / "val2014" / "COCO_val2014_000000000002.jpg").unlink()


def test_bad_pictures_are_counted_and_too_many_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    argv = EXAMPLES["coco"][0](tmp_path)
    spoil_pictures(tmp_path)
    assert prepare.main([*argv, "--workers", "1", "--out", str(tmp_path / "out"), "--max-bad-share", "0.5"]) == 2
    error = capsys.readouterr().err
    assert "3 of 4 items cannot be used, more than --max-bad-share 0.5 allows: 1 x broken picture, first" in error
    assert "dataset_coco.json, images[1]: " in error and "000000000001.jpg cannot be decoded" in error

    common = ["--max-bad-share", "0.75", "--vocabulary", "0"]
    assert prepare.main([*argv, "--workers", "1", "--out", str(tmp_path / "some"), *common]) == 0
    dataset = Dataset(tmp_path / "some")
    assert dataset.store.ids == ["1003"] and len(dataset.pairs("test")) == 5 and not len(dataset.pairs("train"))
    assert {reason: entry["count"] for reason, entry in dataset.info["left_out"].items()} == {
        "broken picture": 1, "missing picture": 1, "not a picture": 1,
    }  # fmt: skip
    note = dataset.info["notes"]["pair without a document in the memory, left out"]
    assert note["count"] == 15 and note["first"].endswith("images[0]")


def test_a_picture_cannot_be_named_outside_of_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    argv = examples.folder(tmp_path)
    (tmp_path / "secret.jpg").write_bytes(examples.picture(1))
    replaced("pictures/metadata.csv", "2.png", "../secret.jpg")(tmp_path)
    assert prepare.main([*argv, "--workers", "1", "--out", str(tmp_path / "out")]) == 2
    assert "1 x picture outside of its folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--passage-words", "5", "--overlap", "5"], "--overlap is 5; it must be at least 0 and below --passage-words"),
        (["--workers", "0"], "--workers is 0; it must be at least 1"),
        (["--vocabulary", "20"], "--vocabulary is 20; it must be 0 (none) or at least 300"),
        (["--max-bad-share", "2"], "--max-bad-share is 2.0; it must be between 0 and 1"),
        (["--memory", "/nowhere"], "--memory is /nowhere, which is no prepared data set"),
    ],
)
def test_options_are_checked(options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert prepare.main([*examples.atlas(tmp_path), "--workers", "1", "--out", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("img2dataset", ["--rows-per-shard", "7"], "img2dataset makes a shard of each of its tars"),
        ("datasets", ["--column", "split=part"], "rows of this format are in the splits of --splits"),
    ],
)
def test_options_that_a_format_has_no_use_for_are_refused(
    name: str, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    argv = EXAMPLES[name][0](tmp_path)
    assert prepare.main([*argv, "--workers", "1", "--out", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("contents", "message"), [("{}", "holds no fingerprint"), ("{", "dataset.json is damaged")])
def test_a_memory_that_is_not_whole_is_named(
    contents: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "memory" / "documents").mkdir(parents=True)
    (tmp_path / "memory" / "dataset.json").write_text(contents)
    argv = [*examples.atlas(tmp_path), "--memory", str(tmp_path / "memory"), "--workers", "1"]
    assert prepare.main([*argv, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and str(tmp_path / "memory") in error


def test_columns_that_make_nothing_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    argv = ["folder", "--table", str(tmp_path / "t.csv"), "--workers", "1", "--out", str(tmp_path / "out")]
    assert prepare.main(argv) == 2
    assert "t.csv has the columns a, b; none is a question" in capsys.readouterr().err
    assert prepare.main([*argv, "--column", "title=c"]) == 2
    assert "--column title is 'c'; " in capsys.readouterr().err
    assert prepare.main([*argv, "--column", "name=a"]) == 2
    assert "write ROLE=NAME with a role of id, image" in capsys.readouterr().err


def test_questions_alone_ask_for_a_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    examples.atlas(tmp_path)
    argv = ["atlas", "--train", str(tmp_path / "train.jsonl"), "--workers", "1", "--out", str(tmp_path / "out")]
    assert prepare.main(argv) == 2
    assert "atlas brings no documents with these options; give --memory" in capsys.readouterr().err
