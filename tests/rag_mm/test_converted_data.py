"""From users' files to trained steps: convert, open, build an index, train, answer; with no code in between."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data import dataset as dataset_module
from data import prepare
from data.dataset import Dataset
from rag_mm.entry import main as train
from rag_mm.evaluate.__main__ import main as evaluate
from rag_mm.mesh import Mesh
from rag_mm.objectives import ObjectivesConfig
from rag_mm.training_batches import TrainingBatches
from retriever.build import main as build
from tests.data.formats.examples import EXAMPLES
from tests.data.small_datasets import question, write_dataset
from tests.rag_mm.joint_setup import build as build_step
from tests.rag_mm.joint_setup import config

SMALL = [
    "--train.steps", "4", "--train.retriever_share", "0.5", "--train.batch_size", "2", "--train.pair_batch_size", "4",
    "--train.retriever_batch_size", "2", "--retriever.k", "2", "--reader.width", "16", "--reader.encoder_layers", "1",
    "--reader.decoder_layers", "1", "--parallel.num_microbatches", "1", "--parallel.pipeline_stages", "1",
]  # fmt: skip


def prepared(root: Path, name: str, *options: str) -> Path:
    argv = EXAMPLES[name][0](root)
    common = ["--out", str(root / "out"), "--vocabulary", "320", "--workers", "1"]
    assert prepare.main([*argv, *common, *options]) == 0
    return root / "out"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dpr", []),
        ("coco", ["--ask", "describe the picture"]),
        pytest.param("dpr", ["--passage-words", "5"], marks=pytest.mark.slow),
        pytest.param("infoseek", [], marks=pytest.mark.slow),
    ],
)
def test_a_source_trains_and_answers(name: str, options: list[str], tmp_path: Path):
    data = prepared(tmp_path, name, *options)
    assert build(["--data.dir", str(data), "--index.dir", str(tmp_path / "index")]) == 0
    run = tmp_path / "run"
    assert train(["--data.dir", str(data), "--run-dir", str(run), *SMALL]) == 0
    records = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert all(math.isfinite(record["loss"]) for record in records)
    # the retriever's steps contrast what is labelled, the reader's generate
    assert records[0]["losses"]["contrastive"] > 0 or name == "infoseek"  # whose one question has one document
    assert records[-1]["losses"]["generation"] > 0
    assert evaluate(["--run-dir", str(run), "--rows", "joint", "--split", "dev"]) == 0
    (path,) = (run / "eval").glob("*.json")
    result = json.loads(path.read_text())
    assert result["num_questions"] == len(Dataset(data).questions("dev")) > 0
    assert 0 <= result["rows"][0]["em"] <= 1


@pytest.mark.slow
def test_pictures_without_labels_train_a_reader_that_reads_nothing(tmp_path: Path):
    data = prepared(tmp_path, "vqa")
    closed = ["--train.documents", "none", "--train.retriever_share", "0", "--objectives.contrastive", "0"]
    assert train(["--data.dir", str(data), "--run-dir", str(tmp_path / "run"), *SMALL, *closed]) == 0


def test_what_a_source_cannot_train_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    def refused(root: Path, name: str, *flags: str) -> str:
        root.mkdir()
        data = prepared(root, name)
        with pytest.raises(SystemExit) as stopped:
            raise SystemExit(train(["--data.dir", str(data), "--run-dir", str(root / "run"), *SMALL, *flags]))
        assert stopped.value.code == 2
        return capfd.readouterr().err

    assert "has no training questions" in refused(tmp_path / "a", "flickr30k")
    gold = ["--train.documents", "gold", "--train.retriever_share", "0", "--objectives.contrastive", "0"]
    error = refused(tmp_path / "b", "vqa", *gold)
    assert "train.documents is gold, but 1000 of" in error and "names no right document" in error
    assert "data.fold is 1;" in refused(tmp_path / "c", "atlas", "--data.fold", "1")


ALONE = ["--train.retriever_share", "0", "--objectives.contrastive", "0"]


def test_a_contrast_without_any_label_is_refused_and_answers_alone_train(tmp_path: Path, capfd: Any):
    data, run = prepared(tmp_path, "atlas"), str(tmp_path / "run")
    with pytest.raises(SystemExit, match="2"):
        train(["--data.dir", str(data), "--run-dir", run, *SMALL])
    error = capfd.readouterr().err
    assert f"no question and no pair that it may see names a right document ({data})" in error
    assert "--objectives.contrastive 0 --train.retriever_share 0" in error
    assert train(["--data.dir", str(data), "--run-dir", run, *SMALL, *ALONE]) == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert len(records) == 4 and records[-1]["skipped_steps"] == 0


def test_who_has_labels_to_contrast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In a mixture one label will do, and it is looked for no further than it is found."""
    whole, bare = write_dataset(tmp_path / "whole", [(str(i), question()) for i in range(600)]), tmp_path / "bare"
    write_dataset(bare, [(str(i), question(gold=[], subject="")) for i in range(600)])
    asked = ObjectivesConfig(contrastive_on="questions")

    def start(directory: Path, *, mixture: Sequence[Path] = (), documents: Any = "retrieved", **how: Any) -> None:
        made = config(directory, documents=documents, **how)
        data = replace(made.data, mixture={str(one): 0.5 for one in mixture})
        dataset = Dataset(directory)
        TrainingBatches(replace(made, data=data), dataset, mesh=Mesh(num_stages=1, num_replicas=1))

    start(bare)  # its pair is labelled
    start(bare, objectives=asked, documents="none")  # the retriever never moves, so nothing is contrasted
    start(bare, objectives=asked, joint_retriever_scale=0.0)
    for mixture in ([], [bare]):
        with pytest.raises(ValueError, match="no question and no pair that it may see names a right document"):
            start(bare, mixture=mixture, objectives=asked)
    start(bare, mixture=[bare, whole], objectives=asked)
    looked_at: list[int] = []
    parsed = dataset_module.SplitView._parsed
    monkeypatch.setattr(dataset_module.SplitView, "_parsed", lambda view, raw: looked_at.append(1) or parsed(view, raw))
    assert Dataset(whole).has_labels() and len(looked_at) == 1
    looked_at.clear()
    assert not Dataset(bare).has_labels() and len(looked_at) == 600
    (tmp_path / "c").mkdir()
    converted = Dataset(prepared(tmp_path / "c", "atlas"))
    looked_at.clear()
    assert not converted.has_labels() and not looked_at


def test_hard_negatives_are_contrasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One of each question's is among the documents, drawn by step; it is right for nobody who does not say so."""
    settings = config(prepared(tmp_path, "dpr"), batch_size=2, retriever_batch_size=2, retriever_share=0.5, steps=20)
    joint, _ = build_step(settings, tmp_path / "run")
    fetch, fetched = joint.memory.fetch, []
    monkeypatch.setattr(joint.memory, "fetch", lambda ids, **how: fetched.append(ids) or fetch(ids, **how))
    drawn: set[str] = set()
    for step in range(10):
        samples, _ = joint.samples(step)
        made = joint.prepare(step)
        names = next(ids for ids in fetched if len(ids) == made.positive.shape[1])  # others are looked at for contents
        fetched.clear()
        drawn |= set(names)
        for i, sample in enumerate(samples):
            right = {name for name, is_right in zip(names, made.positive[i].tolist(), strict=True) if is_right}
            assert right == set(names) & set(sample.gold)
            assert set(names) & set(sample.hard_negatives) or not sample.hard_negatives
    assert "4" in drawn  # which is right for nobody


def test_checked_data_is_not_read_again_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dataset = Dataset(prepared(tmp_path, "dpr"))
    assert dataset.asked_documents() == ["1", "3"] == sorted({s.subject for s in dataset.questions("train")})
    fresh = Dataset(dataset.directory)
    monkeypatch.setattr(Dataset, "questions", lambda *args: pytest.fail("the questions were read"))
    fresh.check_documents()
    assert fresh.asked_documents() == ["1", "3"]
    assert list(fresh.fields_of(["1", "2"])) == [{}, {}]
