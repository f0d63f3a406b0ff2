"""Each format from a source in its real form to a data set that `Dataset` opens."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from data import prepare
from data.dataset import SPLITS, Dataset
from data.formats import FORMATS
from data.formats.wordnet import Entry
from data.image_formats import extension_of
from data.samples import Pair, Sample
from tests.data.formats import examples
from tests.data.formats.examples import EXAMPLES


def convert(root: Path, name: str, *options: str) -> Dataset:
    """The example of a format, converted in this process."""
    source = root / "source"
    source.mkdir(parents=True)
    argv = EXAMPLES[name][0](source)
    status = prepare.main([*argv, "--out", str(root / "out"), "--workers", "1", "--vocabulary", "0", *options])
    assert status == 0
    return Dataset(root / "out")


@pytest.mark.parametrize("name", EXAMPLES)
def test_counts_and_labels(name: str, tmp_path: Path):
    dataset = convert(tmp_path, name)
    _, documents, questions, pairs = EXAMPLES[name]
    assert len(dataset.store) == documents == sum(dataset.info["counts"]["documents"].values())
    for i, split in enumerate(SPLITS):
        asked, paired = dataset.questions(split), dataset.pairs(split)
        assert (len(asked), len(paired)) == (questions[i], pairs[i])
        assert dataset.info["counts"]["questions"][split] == questions[i]
        assert dataset.info["counts"]["pairs"][split] == pairs[i]
        for item in (*asked, *paired):  # nothing names a document that is not there
            assert all(name in dataset.store for name in (*item.gold, *item.hard_negatives))
            assert item.weight == (0 if isinstance(item, Sample) and not item.answers else 1)
        assert not asked.bad_samples and not paired.bad_samples
    assert dataset.info["left_out"] == {} and dataset.info["licences"][0]["licence"] == "unknown"
    assert not dataset.has_folds and json.loads((tmp_path / "out" / "splits.json").read_text())["splits"]
    assert all(len(source["sha256"]) == 64 for source in dataset.info["sources"])
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        ["asked.json", "dataset.json", "documents", "pairs", "questions", "splits.json"]
    )


def questions(dataset: Dataset) -> dict[str, Sample]:
    return {sample.id: sample for split in SPLITS for sample in dataset.questions(split)}


def pairs(dataset: Dataset) -> dict[str, Pair]:
    return {pair.id: pair for split in SPLITS for pair in dataset.pairs(split)}


def test_img2dataset_keeps_pictures_as_they_are_and_what_the_json_says(tmp_path: Path):
    dataset = convert(tmp_path, "img2dataset")
    document = dataset.store.fetch(["000000002"])[0]
    assert document.image == examples.picture(2) and extension_of(document.image) == "jpg"
    assert document.text == "\n" and document.meta["LICENSE"] == "?" and document.meta["width"] == 32
    pair = pairs(dataset)["000000002"]
    assert (pair.text, pair.gold, pair.meta["similarity"]) == ("a flag 000000002", ("000000002",), 0.31)
    captioned = convert(tmp_path / "again", "img2dataset", "--captioned")
    assert captioned.store.fetch(["000000002"])[0].passage == "a flag 000000002"


def test_img2dataset_checks_the_parquet(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    argv = examples.img2dataset(tmp_path)
    (tmp_path / "laion" / "00001.parquet").unlink()
    (tmp_path / "laion" / "00000.parquet").rename(tmp_path / "laion" / "00001.parquet")
    assert prepare.main([*argv, "--workers", "1", "--out", str(tmp_path / "out")]) == 2
    assert "00001.tar holds 1 samples, but 00001.parquet says that 2 downloads succeeded" in capsys.readouterr().err


def test_a_sparse_picture_is_not_unfolded(tmp_path: Path):
    argv = examples.img2dataset(tmp_path)
    tar = tmp_path / "laion" / "00001.tar"
    with tarfile.open(tar) as archive:
        members = {m.name: archive.extractfile(m).read() for m in archive}  # type: ignore[union-attr]
    with tarfile.open(tar, "w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            if name.endswith(".jpg"):  # one byte at the end of 2 GiB
                data = f"1\n{2**31 - 1}\n1\n".encode().ljust(512, b"\0") + b"x"
                info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": name}
                info.pax_headers["GNU.sparse.realsize"] = str(2**31)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    common = ["--workers", "1", "--vocabulary", "0", "--max-bad-share", "0.5"]
    assert prepare.main([*argv, "--out", str(tmp_path / "out"), *common]) == 0
    dataset = Dataset(tmp_path / "out")
    assert dataset.info["left_out"]["sparse file"]["count"] == 1 and len(dataset.store) == 2


def test_kilt_pages_and_provenance(tmp_path: Path):
    dataset = convert(tmp_path, "kilt")
    page = dataset.store.fetch(["10.5"])[0]  # an id with a dot is an id like any other
    assert page.text == "Nepal\nIts capital is Kathmandu.\nSection::::Etymology.\n"
    assert page.meta["history"] == {"pageid": 2} and page.meta["anchors"] == []
    sample = questions(dataset)["-1027463814348738734"]
    assert (sample.answers, sample.gold, sample.subject) == (("A", "the A"), ("290",), "290")
    assert sample.meta["output"][0]["provenance"][0]["start_paragraph_id"] == 1
    assert sample.meta["meta"] == {"left_context": "", "mention": "", "right_context": ""}
    note = dataset.info["notes"]["id of a right document that is not in the memory, dropped"]
    assert note["count"] == 1 and note["first"].endswith("nq-train-kilt.jsonl, line 1")
    unanswered = questions(dataset)["t1"]
    assert (unanswered.question, unanswered.answers, unanswered.weight) == ("what is B?", (), 0.0)


def test_passages_have_numbers_titles_and_a_map(tmp_path: Path):
    dataset = convert(tmp_path, "kilt", "--passage-words", "4", "--overlap", "1")
    ids = [f"290#{i}" for i in range(4)]
    found = dataset.store.fetch(ids)
    words = ["A", "is", "the", "first", "letter", "of", "the", "alphabet.", "Section::::History.", "It", "is", "old."]
    # by hand: passages of 4 words begin at words 0, 3, 6, 9; the last one begins with the last word of the one before
    assert [d.passage.split() for d in found] == [words[0:4], words[3:7], words[6:10], words[9:12]]
    assert {d.title for d in found} == {"A"} and "290#4" not in dataset.store
    assert [(d.meta["document"], d.meta["passage"]) for d in found] == [("290", i) for i in range(4)]
    assert "history" in found[0].meta and "history" not in found[1].meta
    rows = [json.loads(line) for line in (tmp_path / "out" / "passages.jsonl").open()]
    assert rows == [{"id": "290", "passages": 4}, {"id": "10.5", "passages": 2}]
    sample = questions(dataset)["-1027463814348738734"]
    assert (sample.gold, sample.subject) == (tuple(ids), "290#0")


def test_dpr_with_its_table(tmp_path: Path):
    dataset = convert(tmp_path, "dpr")
    document = dataset.store.fetch(["1"])[0]
    assert document.text == f"Aaron\n{examples.PASSAGES[0][1]}\n" and document.search_text == document.text.strip()
    first, second = dataset.questions("train")
    assert (first.id, first.gold, first.hard_negatives) == ("train-0-0", ("1", "2"), ("3",))
    assert (first.answers, first.field) == (("Aaron", "aaron"), "nq_train_psgs_w100")
    assert first.meta["negative_ctxs"] == [{"id": "4", "score": 12.5, "title_score": 0}]
    assert [context["id"] for context in first.meta["positive_ctxs"]] == ["1", "2"]
    assert (second.gold, second.hard_negatives) == (("3",), ("4", "1"))


def test_dpr_without_its_table_takes_each_context_once(tmp_path: Path):
    argv = examples.dpr(tmp_path)
    argv = ["dpr", *argv[argv.index("--train") :]]
    assert prepare.main([*argv, "--workers", "1", "--out", str(tmp_path / "out"), "--vocabulary", "0"]) == 0
    dataset = Dataset(tmp_path / "out")
    assert {d.id: (d.title, d.passage) for d in dataset.store.fetch(dataset.store.ids)} == {
        name: (title, text) for name, text, title in examples.PASSAGES
    }


def test_atlas_and_fid_put_the_target_first(tmp_path: Path):
    dataset = convert(tmp_path / "atlas", "atlas")
    assert dataset.questions("train")[0].answers == ("KTM", "Kathmandu")
    assert dataset.store.fetch(["0"])[0].text == "Nepal\nsection: Capital\nKathmandu is the capital.\n"
    assert dataset.store.fetch(["1"])[0].meta == {"hierarchy": ["Nepal"]}
    assert questions(dataset)["q7"].meta == {"metadata": {"x": 1}}
    dataset = convert(tmp_path / "fid", "fid")
    first = dataset.questions("train")[0]
    assert (first.answers, first.gold, first.hard_negatives) == (("Kathmandu", "KTM"), ("3",), ("1", "2"))
    assert first.meta["ctxs"][0] == {"id": "1", "score": 80.1}


def test_coco_keeps_five_captions_and_restval_trains(tmp_path: Path):
    dataset = convert(tmp_path, "coco")
    train = list(dataset.pairs("train"))
    assert [pair.gold for pair in train] == [("1000",)] * 5 + [("1001",)] * 5
    assert train[0].text == "Flag 0." and train[0].meta == {"tokens": ["flag", "0"], "imgid": 0}
    document = dataset.store.fetch(["1001"])[0]
    assert document.meta["filename"] == "COCO_val2014_000000000001.jpg" and document.meta["sentids"] == [5, 6, 7, 8, 9]
    assert document.image == (tmp_path / "source/images/val2014/COCO_val2014_000000000001.jpg").read_bytes()
    assert document.text == "\n"


def test_vqa_keeps_ten_answers_and_joins_annotations_in_any_order(tmp_path: Path):
    dataset = convert(tmp_path, "vqa")
    sample = questions(dataset)["1001"]
    assert sample.answers == ("netting", "net", "the net")  # the multiple choice answer, then by number of votes
    assert [a["answer"] for a in sample.meta["answers"]] == ["net"] * 6 + ["netting"] * 3 + ["the net"]
    assert (sample.field, sample.kind, sample.meta["image_id"]) == ("what is", "picture", 1)
    assert sample.image == (tmp_path / "source/images/train2014/COCO_train2014_000000000001.jpg").read_bytes()
    assert dataset.fields == ["what is"]


def test_questions_on_another_data_sets_documents(tmp_path: Path):
    dpr = convert(tmp_path / "wiki", "dpr")
    dataset = convert(tmp_path / "vqa", "vqa", "--memory", str(dpr.directory))
    assert dataset.store.fingerprint == dpr.store.fingerprint and dataset.info["memory_of"] == dpr.fingerprint
    assert len(dataset.questions("train")) == 3
    for file in sorted((dpr.directory / "documents").glob("shard-*")):  # a folder by hand may call its tars otherwise
        file.rename(file.with_name(file.name.replace("shard-", "passages-")))
    again = convert(tmp_path / "vqa again", "vqa", "--memory", str(dpr.directory))
    assert again.store.fingerprint == dpr.store.fingerprint
    kilt = convert(tmp_path / "kilt", "kilt", "--passage-words", "4")
    argv = ["kilt", "--train", str(tmp_path / "kilt/source/nq-train-kilt.jsonl"), "--memory", str(kilt.directory)]
    assert prepare.main([*argv, "--workers", "1", "--out", str(tmp_path / "again"), "--vocabulary", "0"]) == 0
    sample = Dataset(tmp_path / "again").questions("train")[0]
    assert sample.gold == ("290#0", "290#1", "290#2")  # 12 words


def test_a_folder_with_a_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    dataset = convert(tmp_path, "folder")
    assert "\ncolumns: image=file_name, caption=caption, split=split\n" in capsys.readouterr().out
    assert dataset.info["columns"] == {"image": "file_name", "caption": "caption", "split": "split"}
    # line 0 is the header; the third row has no caption, so no pair
    assert [(p.text, p.gold) for p in dataset.pairs("train")] == [('the "first", red', ("1",))]
    document = next(d for d in dataset.store.fetch(dataset.store.ids) if d.meta["photographer"] == "Ann")
    assert document.image == (tmp_path / "source/pictures/a/1.jpg").read_bytes()
    assert [p.text for p in dataset.pairs("dev")] == ["second"]
    shown = dataset.store.fetch(list(dataset.pairs("dev")[0].gold))[0].image
    assert shown == (tmp_path / "source/pictures/2.png").read_bytes() and extension_of(shown) == "png"


def test_a_folder_with_questions_in_jsonl(tmp_path: Path):
    examples.write_pictures(tmp_path, ["x.jpg"])
    rows = [{"img": "x.jpg", "question": "which?", "answer": ["a", "b", "a"], "split": "test", "difficulty": 3}]
    examples.write_lines(tmp_path / "t.jsonl", rows)
    wiki = convert(tmp_path / "wiki", "atlas")
    argv = ["folder", "--table", str(tmp_path / "t.jsonl"), "--column", "image=img", "--memory", str(wiki.directory)]
    assert prepare.main([*argv, "--workers", "1", "--out", str(tmp_path / "o"), "--vocabulary", "0"]) == 0
    (sample,) = Dataset(tmp_path / "o").questions("test")
    assert (sample.question, sample.answers, sample.kind) == ("which?", ("a", "b"), "picture")
    assert sample.image == (tmp_path / "x.jpg").read_bytes() and sample.meta == {
        "img": "x.jpg",
        "split": "test",
        "difficulty": 3,
    }


def test_beir_judgements(tmp_path: Path):
    dataset = convert(tmp_path, "beir")
    (pair,) = dataset.pairs("train")
    assert (pair.id, pair.text, pair.gold) == ("PLAIN-2", "do statins help", ("MED-10", "10.1000/b"))
    assert pair.hard_negatives == ("3",)
    assert pair.meta == {"metadata": {"kind": "health"}, "scores": {"MED-10": 2, "10.1000/b": 1, "3": 0}}
    document = dataset.store.fetch(["MED-10"])[0]
    assert document.passage == "Statin use\nand survival." and document.meta == {"metadata": {"url": "http://x"}}
    assert [p.id for p in dataset.pairs("test")] == ["q2"] and not len(dataset.pairs("dev"))


def test_infoseek_entities_and_ranges(tmp_path: Path):
    dataset = convert(tmp_path, "infoseek")
    (train,), (dev,) = dataset.questions("train"), dataset.questions("dev")
    assert (train.answers, train.gold, train.meta["entity_text"]) == (("Kathmandu", "KTM"), ("Q837",), "Nepal")
    assert dev.meta["answer_eval"] == [{"wikidata": 9.0, "range": [8.1, 9.9]}]
    assert dev.meta["data_split"] == "val_unseen_entity" and dev.image is not None
    assert dataset.store.fetch(["Q837"])[0].meta["wikipedia_summary"] == "A country."


def test_flickr_tokens(tmp_path: Path):
    dataset = convert(tmp_path, "flickr30k-tokens")
    pair = pairs(dataset)["1000092795.jpg#3"]
    assert (pair.text, pair.gold) == ("Caption 3 of 1000092795 .", ("1000092795.jpg",))


def test_wit_joins_pixels_and_takes_one_language(tmp_path: Path):
    dataset = convert(tmp_path, "wit")
    document = dataset.store.fetch(["train-0-1"])[0]
    assert (document.title, document.fields, document.passage) == ("Nepal", {"section": "Flag"}, "A flag.")
    assert document.image == examples.picture(0) and document.meta["mime_type"] == "image/jpeg"
    assert document.meta["image_url"] == "http://u/n.jpg" and document.meta["language"] == "en"
    assert {p.id: p.text for p in pairs(dataset).values()} == {
        "train-0-1:reference": 'The "flag"', "train-0-1:attribution": "English: flag", "train-0-3:alt": "alt",
    }  # fmt: skip


ROWS: list[dict[str, Any]] = [
    {"id": "a", "title": "T", "question": "q?", "answers": {"text": ["x", "y"], "answer_start": [0, 3]}, "level": 1},
    {"id": "b", "title": "U", "question": "r?", "answers": {"text": ["z"], "answer_start": [0]}, "level": 2},
]


@pytest.mark.parametrize("kind", ["parquet", "json", "csv", "arrow"])
def test_datasets_reads_plain_files(kind: str, tmp_path: Path):
    import datasets

    folder = tmp_path / "files"
    folder.mkdir()
    rows = ROWS if kind != "csv" else [{**row, "answers": row["answers"]["text"][0]} for row in ROWS]
    table = datasets.Dataset.from_list(rows)
    if kind == "arrow":
        table.save_to_disk(folder)
    else:
        getattr(table, f"to_{kind}")(folder / f"train.{kind}")
    wiki = convert(tmp_path / "wiki", "atlas")
    argv = [
        "datasets",
        "--dataset",
        str(folder),
        "--memory",
        str(wiki.directory),
        "--workers",
        "1",
        "--out",
        str(tmp_path / "out"),
    ]
    assert prepare.main([*argv, "--vocabulary", "0"]) == 0
    first, second = Dataset(tmp_path / "out").questions("train")
    assert (first.id, first.answers) == ("a", ("x", "y") if kind != "csv" else ("x",))
    assert (second.question, second.meta) == ("r?", {"title": "U", "level": 2})


def test_what_a_question_must_not_be_given_is_kept_as_ids_of_the_memory(tmp_path: Path):
    wiki = convert(tmp_path / "wiki", "atlas")
    known = wiki.store.ids[0]
    rows = [{"question": "q?", "answers": ["x"], "forbidden": [known, "nowhere"]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["datasets", "--dataset", str(tmp_path / "rows.jsonl"), "--memory", str(wiki.directory), "--workers", "1"]
    assert prepare.main([*argv, "--out", str(tmp_path / "out"), "--vocabulary", "0"]) == 0
    (question,) = Dataset(tmp_path / "out").questions("train")
    assert question.forbidden == (known,) and question.meta == {}


def test_datasets_finds_pictures_beside_a_single_file(tmp_path: Path):
    picture = examples.picture(1)
    (tmp_path / "a.png").write_bytes(picture)
    (tmp_path / "meta.jsonl").write_text('{"file_name": "a.png", "title": "A"}\n')
    argv = ["datasets", "--dataset", str(tmp_path / "meta.jsonl"), "--workers", "1", "--vocabulary", "0"]
    assert prepare.main([*argv, "--out", str(tmp_path / "out")]) == 0
    store = Dataset(tmp_path / "out").store
    assert [document.image for document in store.fetch(store.ids)] == [picture]


def test_datasets_passes_pictures_on_unchanged(tmp_path: Path):
    dataset = convert(tmp_path, "datasets")
    document = dataset.store.fetch(["validation-0"])[0]
    assert document.image == (tmp_path / "source" / "three.jpg").read_bytes() and document.meta == {"source": "web"}
    assert [(p.text, p.gold) for p in dataset.pairs("dev")] == [("three", ("validation-0",))]


def test_wordnet_asks_with_definitions_for_entries_that_do_not_hold_them(tmp_path: Path):
    dataset = convert(tmp_path, "wordnet")
    asked = {sample.answers[0]: sample for sample in questions(dataset).values()}
    dog = asked["dog"]
    assert dog.answers == ("dog", "domestic dog") and dog.field == "noun" and dog.gold == (dog.subject,) == (dog.id,)
    assert dog.question == 'a canine (a "good ") that keep'  # by hand: "dog" and "dogs" are the entry's own
    document = dataset.store.fetch([dog.subject])[0]
    assert document.title == "dog, domestic dog"
    assert document.passage == "noun, animal. kind of: animal. kinds: hound. related: chase."
    assert document.meta["examples"] == ["the dog barked", "his dogs all night"]
    live = dataset.store.fetch([asked["live"].subject])[0]
    assert (live.id[0], live.title, live.passage) == ("a", "live, alive", "adjective, all. opposite: dead.")
    note = dataset.info["notes"]["definition of nothing but the entry's own words, not asked"]
    assert note["count"] == 1 and note["first"].endswith("data.noun, line 4") and "hound" not in asked


def test_wordnet_asks_with_examples_for_definitions(tmp_path: Path):
    dataset = convert(tmp_path, "wordnet", "--queries", "examples")
    asked = {sample.id: sample for sample in questions(dataset).values()}
    assert sorted(sample.question for sample in asked.values()) == [
        "his dogs all night", "the dog barked", "the wall is dead",
    ]  # fmt: skip
    (dog,) = {sample.subject for sample in asked.values() if "dog" in sample.question}
    assert {f"{dog}.0", f"{dog}.1"} < set(asked)
    assert dataset.store.fetch([dog])[0].passage == 'a canine (a "good dog") that dogs keep'


def test_wordnet_splits_by_entry_and_every_entry_is_in_the_memory():
    entries = [Entry.read(f"{i:08d} 03 n 01 x{i} 0 000 | gloss", "line") for i in range(2000)]
    share = {split: sum(entry.split == split for entry in entries) / 2000 for split in SPLITS}
    assert share["test"] == pytest.approx(0.05, abs=0.015) and share["dev"] == pytest.approx(0.05, abs=0.015)


def test_only_fold_0_exists(tmp_path: Path):
    convert(tmp_path, "atlas")
    with pytest.raises(ValueError, match=r"data\.fold is 1; .* has the splits of its source, which is fold 0"):
        Dataset(tmp_path / "out", fold=1)


def test_every_format_has_an_example_and_a_line_in_the_guide():
    guide = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    table = [line.split("|")[1] for line in guide.splitlines() if line.startswith("| `")]
    assert set(FORMATS) == {name.removesuffix("-tokens") for name in EXAMPLES}
    assert all(any(f"`{name}`" in cell for cell in table) for name in FORMATS)


def test_help_names_every_format_and_its_options(capsys: pytest.CaptureFixture[str]):
    for argv, words in (
        (["--help"], list(FORMATS)),
        (["dpr", "--help"], ["--passages", "--train", "--memory", "--passage-words", "--workers", "--licence"]),
    ):
        with pytest.raises(SystemExit) as stopped:
            prepare.main(argv)
        assert stopped.value.code == 0
        text = capsys.readouterr().out
        assert all(word in text for word in words)
