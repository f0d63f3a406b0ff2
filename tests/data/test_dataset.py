import shutil
from pathlib import Path

import pytest

from data import dataset as dataset_module
from data import images
from data.dataset import SPLITS, Dataset, digest
from tests.data.small_datasets import question, write_dataset


def test_splits_are_a_partition_of_all_questions_in_every_fold(factbook_dir: Path):
    everything = None
    tested: list[str] = []
    for fold in range(4):
        dataset = Dataset(factbook_dir, fold=fold)
        parts = {split: dataset.questions(split).ids for split in SPLITS}
        together = sorted(i for ids in parts.values() for i in ids)
        everything = everything or together
        assert together == everything and len(set(together)) == len(together)
        tested += parts["test"]
        for split in SPLITS:
            counted = dataset.info["counts"]["folds"][fold][split]["questions"]
            assert len(dataset.questions(split)) == counted
    assert sorted(tested) == everything  # each held out exactly once


def test_held_out_countries_train_nothing(factbook_dir: Path):
    for fold in range(4):
        dataset = Dataset(factbook_dir, fold=fold)
        held_out = {*dataset.held_out["dev"], *dataset.held_out["test"]}
        assert held_out and held_out < set(dataset.store.ids)  # their documents stay in the memory
        documents = dataset.store.fetch(sorted(held_out))
        titles = {document.title for document in documents}
        questions, pairs = list(dataset.questions("train")), list(dataset.pairs("train"))
        assert not {sample.subject for sample in questions} & held_out
        assert not {d for sample in (*questions, *pairs) for d in sample.gold} & held_out
        assert not {pair.text for pair in pairs} & titles
        shown = {sample.image for split in ("dev", "test") for sample in dataset.questions(split)} - {None}
        assert shown and not shown & {sample.image for sample in (*questions, *pairs)}


def test_a_question_by_name(factbook: Dataset):
    samples = {s.id: s for split in SPLITS for s in factbook.questions(split)}
    sample = samples["np-capital-name"]
    assert "Nepal" in sample.question and sample.image is None
    assert (sample.answers, sample.kind, sample.field) == (("Kathmandu",), "name", "capital")
    assert (sample.subject, sample.gold, sample.weight) == ("np", ("np",), 1.0)


def test_positions(factbook: Dataset):
    train = factbook.questions("train")
    assert train[-1].id == train.ids[-1] and train[0] is train[0]
    with pytest.raises(IndexError):
        train[len(train)]


def test_missing_data_names_the_command(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"python -m data\.prepare factbook --out .*nowhere"):
        Dataset(tmp_path / "nowhere")


def test_wrong_fold_and_split(factbook_dir: Path, factbook: Dataset):
    with pytest.raises(ValueError, match=r"data\.fold is 4"):
        Dataset(factbook_dir, fold=4)
    with pytest.raises(ValueError, match="allowed are train, dev, test"):
        factbook.questions("valid")


def test_broken_samples_keep_their_place_with_weight_0_and_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(images, "MAX_BYTES", 1 << 20)
    body = question()
    question_samples = [
        ("s0", body),
        ("s1", {**body, "png": b"no picture"}),
        ("s2", {"json": b"{"}),
        ("s3", question(answers=[])),
        ("s4", question(kind="picture")),
        ("s5", body),
        ("s6", {**body, "png": bytes((1 << 20) + 1)}),
    ]
    dataset = Dataset(write_dataset(tmp_path, question_samples))
    train = dataset.questions("train")
    for _ in range(2):
        assert [sample.weight for sample in train] == [1, 0, 0, 0, 0, 1, 0]
    assert [sample.id for sample in train] == ["s0", "s1", "s2", "s3", "s4", "s5", "s6"]
    assert train.bad_samples == {
        "not an image": 1,
        "json: malformed": 1,
        "malformed json: ValueError": 1,
        "more than 1 MiB": 1,
    }
    assert dataset.pairs("train")[0].weight == 0


def test_what_is_kept_is_bounded_in_bytes_and_read_again_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_dataset(tmp_path, [(f"s{i}", question(question="?" * (10 * i))) for i in range(40)])
    expected = list(Dataset(folder).questions("train"))
    monkeypatch.setattr(dataset_module, "KEPT_BYTES", 2000)
    view = Dataset(folder).questions("train")
    for places in (range(40), [39, 39, 3], range(0, 40, 7), [39], range(39, -1, -1)):
        assert view.read(places) == [expected[i] for i in places]
        assert 0 < sum(read.num_bytes for read in view._kept.values()) == view._kept_bytes <= 2000


def test_a_document_that_training_names_and_the_store_lacks_is_named_before_the_first_step(tmp_path: Path):
    whole = write_dataset(tmp_path / "whole", [("s0", question(hard_negatives=["d"]))], documents=["c", "d"])
    Dataset(whole).check_documents()
    Dataset(whole).store.delete("d")
    with pytest.raises(ValueError, match=r"s0 of .*whole names document 'd', which is not in the store .*documents"):
        Dataset(whole).check_documents()


def test_an_edit_changes_the_document_but_not_the_data_fingerprint(factbook_dir: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(factbook_dir, copy)
    dataset = Dataset(copy)
    dataset.store.edit("np", "capital", "Pokhara")
    again = Dataset(copy)
    assert "\ncapital: Pokhara\n" in again.store.fetch(["np"])[0].text
    assert again.fingerprint == dataset.fingerprint and again.store.num_edits == 1


def test_digest_depends_on_ids_and_order():
    assert len({digest(ids) for ids in (["a", "b"], ["b", "a"], ["ab"], ["a"])}) == 4
    assert digest(iter(["a", "b"])) == digest(["a", "b"])


def test_a_damaged_tokenizer_is_named(tmp_path: Path):
    write_dataset(tmp_path, [("q", question())])
    (tmp_path / "tokenizer").mkdir(exist_ok=True)
    for contents in ("{", '{"model": 3}', "\x00"):
        (tmp_path / "tokenizer" / "tokenizer.json").write_text(contents)
        with pytest.raises(ValueError, match=rf"{tmp_path}/tokenizer cannot be read"):
            _ = Dataset(tmp_path).tokenizer
