"""A run's zero-shot classification and captions, from a table of pictures to figures."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from data import prepare
from data.dataset import Dataset
from rag_mm.evaluate.__main__ import main
from rag_mm.evaluate.answer import load_run
from rag_mm.evaluate.tasks.captions import Captions
from rag_mm.evaluate.tasks.task import align
from rag_mm.evaluate.tasks.zero_shot import ZeroShot
from retriever.embed import pictures
from tests.rag_mm.evaluate.test_image_text_run import karpathy, save_run

LABELS = ["red kite", "barn owl", "red kite", "robin", "robin", "barn owl", "robin"]


class TwoPrompts(ZeroShot):
    """With prompts of its own, as a user's module would have it."""

    name = "birds"

    def __init__(self) -> None:
        super().__init__(templates=("a {} in a tree", "the {}"))


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, draw = tmp_path_factory.mktemp("birds"), numpy.random.default_rng(0)
    with (root / "birds.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["id", "image", "question", "answers", "split"])
        for i, label in enumerate(LABELS):
            Image.fromarray(draw.integers(0, 256, (20, 20, 3), dtype=numpy.uint8)).save(root / f"{i}.png")
            table.writerow([f"b{i}", f"{i}.png", "which bird is this?", label, "test"])
        table.writerow(["words", "", "which bird hoots?", "barn owl", "test"])
    source = karpathy(root / "coco")
    argv = ["coco", "--karpathy", str(source), "--images", str(source.parent / "images"), "--vocabulary", "300"]
    assert prepare.main([*argv, "--out", str(root / "memory"), "--workers", "1"]) == 0
    argv = ["folder", "--table", str(root / "birds.csv"), "--memory", str(root / "memory"), "--workers", "1"]
    assert prepare.main([*argv, "--out", str(root / "data")]) == 0
    return root / "data"


@pytest.fixture(scope="module")
def run_dir(data_dir: Path) -> Path:
    return save_run(data_dir, data_dir.parent / "run", "mean")


@pytest.mark.parametrize("name", ["zero_shot", "tests.rag_mm.evaluate.test_zero_shot_run:TwoPrompts"])
def test_the_figures_are_those_of_a_plain_loop(name: str, run_dir: Path):
    assert main(["--run-dir", str(run_dir), "--rows", "none", "--tasks", name]) == 0
    told = json.loads((run_dir / "eval" / "test.towers.json").read_text())["tasks"]
    templates = ("a photo of a {}.",) if name == "zero_shot" else ("a {} in a tree", "the {}")
    run = load_run(run_dir)
    encoder, size = run.model.encoder, run.config.data.image_size

    def unit(vector: torch.Tensor) -> torch.Tensor:
        return vector / vector.norm()

    classes = {}
    with torch.no_grad():
        blank, none = torch.ones(1, 3, size, size), torch.zeros(1)
        for label in set(LABELS):
            texts = [template.replace("{}", label) for template in templates]
            rows = [encoder(encoder.features([text], blank, none, side="document"))[0] for text in texts]
            classes[label] = unit(torch.stack([unit(row) for row in rows]).mean(0))
        ranks = []
        for sample in run.dataset.questions("test"):
            if sample.image is None:
                continue
            image, there = pictures([sample.image], size)
            row = encoder(encoder.features([""], image, there, side="query"))[0]
            order = sorted(classes, key=lambda label: -float(row @ classes[label]))
            ranks.append(1 + order.index(sample.answers[0]))
    figures = told[name.rpartition(":")[2] if name == "zero_shot" else "birds"]["rows"]["joint"]["figures"]
    assert len(ranks) == len(LABELS) == figures["hit@1"]["num"] and len(set(ranks)) > 1
    assert figures["hit@1"]["value"] == pytest.approx(sum(rank == 1 for rank in ranks) / len(ranks))
    right = Counter(label for label, rank in zip(LABELS, ranks, strict=True) if rank == 1)
    recall = sum(right[label] / count for label, count in Counter(LABELS).items()) / len(set(LABELS))
    assert figures["mean_per_class_recall"]["value"] == pytest.approx(recall)


def test_captions_of_a_run_are_scored_like_a_file_of_them(run_dir: Path, data_dir: Path):
    """Answers to questions about pictures, against what counts as right for them."""
    assert main(["--run-dir", str(run_dir), "--rows", "no_documents", "--tasks", "captions"]) == 0
    result = json.loads((run_dir / "eval" / "test.json").read_text())
    lines = [json.loads(line) for line in (run_dir / "eval" / "test.predictions.jsonl").read_text().splitlines()]
    said = {line["id"]: line["answer"] for line in lines if line["kind"] == "picture"}
    gold = {s.id: s.answers for s in Dataset(data_dir).questions("test") if s.image is not None}
    scores = Captions().score(align(said, gold)).results()
    figures = result["tasks"]["captions"]["rows"]["no_documents"]["figures"]
    assert len(said) == len(LABELS) and {n: f["value"] for n, f in figures.items()} == pytest.approx(scores)


def test_a_split_without_pictures_is_refused(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        raise SystemExit(main(["--run-dir", str(run_dir), "--tasks", "zero_shot", "--rows", "none", "--split", "dev"]))
    assert stopped.value.code == 2
    assert "questions/dev has no question with a picture" in " ".join(capsys.readouterr().err.split())
