"""A run's image-text retrieval: what single rows and a plain loop say, on any layout, after any interruption."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from rich.console import Console

from data import prepare
from data.indexing import main as index_shards
from rag_mm.evaluate import image_text, score, tower_rows
from rag_mm.evaluate.__main__ import main
from rag_mm.evaluate.answer import Interrupted, Run, load_run
from rag_mm.evaluate.evaluation import evaluate_run
from rag_mm.evaluate.layout import LayoutConfig
from rag_mm.evaluate.questions import QuestionsConfig
from rag_mm.evaluate.task_scores import find_tasks
from retriever.embed import pictures
from tests.distributed import run_on_ranks
from tests.rag_mm.evaluate.conftest import save_untrained, small_config

NUM, STEM, NPZ = 9, "eval/test.towers.json", "eval/test.image_text.npz"


def karpathy(root: Path) -> Path:
    """NUM test pictures of COCO in Karpathy's file, two captions each (the first three), and one to train on."""
    draw, images = numpy.random.default_rng(0), []
    (root / "images").mkdir(parents=True)
    for i in range(NUM + 1):
        buffer, name = io.BytesIO(), f"COCO_val2014_{i:012d}.jpg"
        Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=numpy.uint8)).resize((48, 40)).save(buffer, "JPEG")
        (root / "images" / name).write_bytes(buffer.getvalue())
        texts = [f"number {i} of {n} things {draw.integers(1000)}" for n in range(3 if i == 0 else 2)]
        sentences = [{"raw": t, "tokens": t.split(), "imgid": i, "sentid": 10 * i + n} for n, t in enumerate(texts)]
        split = "train" if i == NUM else "test"
        images.append({"filename": name, "imgid": i, "cocoid": 100 + i, "split": split, "sentences": sentences})
    (root / "coco.json").write_text(json.dumps({"dataset": "coco", "images": images}))
    return root / "coco.json"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return karpathy(tmp_path_factory.mktemp("coco"))


@pytest.fixture(scope="module")
def data_dir(source: Path) -> Path:
    argv = ["coco", "--karpathy", str(source), "--images", str(source.parent / "images"), "--vocabulary", "300"]
    assert prepare.main([*argv, "--out", str(source.parent / "data"), "--workers", "1"]) == 0
    return source.parent / "data"


def save_run(data_dir: Path, run_dir: Path, fusion: str) -> Path:
    config = small_config(data_dir, run_dir)
    retriever = dataclasses.replace(config.retriever, fusion=fusion, text_dim=32, image_dim=32, learned_text=True)
    save_untrained(dataclasses.replace(config, retriever=retriever))
    return run_dir


@pytest.fixture(scope="module")
def run_dir(data_dir: Path) -> Path:
    return save_run(data_dir, data_dir.parent / "run", "mean")


@pytest.fixture(scope="module")
def whole(run_dir: Path) -> tuple[bytes, dict[str, Any]]:
    """The result file and the embeddings of one process, in parts of four rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tower_rows, "BLOCK", 4)
        patch.setattr(tower_rows, "PART", 4)
        evaluate(run_dir, LayoutConfig())
    return files(run_dir)


def files(run_dir: Path) -> tuple[bytes, dict[str, Any]]:
    with numpy.load(run_dir / NPZ) as arrays:
        return (run_dir / STEM).read_bytes(), {name: arrays[name] for name in arrays.files}


def evaluate(run_dir: Path, parallel: LayoutConfig, **options: Any) -> None:
    run = load_run(run_dir, parallel=parallel)
    which, tasks = QuestionsConfig("test"), find_tasks(["image_text"])
    evaluate_run(run, [], which, console=Console(quiet=True), tasks=tasks, **options)


def test_the_figures_are_those_of_a_plain_loop(run_dir: Path, whole: tuple[bytes, dict[str, Any]], source: Path):
    run = load_run(run_dir)
    encoder, size = run.model.encoder, run.config.data.image_size
    said = [i for i in json.loads(source.read_text())["images"] if i["split"] == "test"]
    embedding: dict[str, dict[str, torch.Tensor]] = {"image": {}, "text": {}}
    with torch.no_grad():
        for entry in said:
            image, there = pictures([(source.parent / "images" / entry["filename"]).read_bytes()], size)
            features = encoder.features([""], image, there, side="document")
            embedding["image"][str(entry["cocoid"])] = encoder(features)[0]
            for sentence in entry["sentences"]:
                features = encoder.features([sentence["raw"]], torch.ones_like(image), torch.zeros(1), side="query")
                embedding["text"][str(sentence["sentid"])] = encoder(features)[0]
    owner = {str(s["sentid"]): str(entry["cocoid"]) for entry in said for s in entry["sentences"]}
    image_to_text, text_to_image = [], []
    for name, row in embedding["image"].items():
        order = sorted(embedding["text"], key=lambda t: -float(row @ embedding["text"][t]))
        image_to_text.append(next(rank for rank, t in enumerate(order, start=1) if owner[t] == name))
    for text, row in embedding["text"].items():
        order = sorted(embedding["image"], key=lambda i: -float(row @ embedding["image"][i]))
        text_to_image.append(1 + order.index(owner[text]))
    figures = json.loads(whole[0])["tasks"]["image_text"]["rows"]["joint"]["figures"]
    for way, ranks in (("image_to_text", image_to_text), ("text_to_image", text_to_image)):
        for k in (1, 5, 10):
            assert figures[f"{way}_hit@{k}"]["value"] == pytest.approx(numpy.mean(numpy.array(ranks) <= k))
        assert figures[f"{way}_mean_rank"]["value"] == pytest.approx(numpy.mean(ranks))
        assert figures[f"{way}_hit@1"]["num"] == len(ranks)
    assert len(text_to_image) == 2 * NUM + 1 and len(image_to_text) == NUM
    assert 1 < numpy.mean(text_to_image) < NUM, "not all the same"


LAYOUTS = {
    "2 replicas": LayoutConfig(data_replicas=2),
    "2 stages, piped": LayoutConfig(pipeline_stages=2, towers="piped"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_layout_moves_a_bit(name: str, run_dir: Path, whole: tuple[bytes, dict[str, Any]]):
    shutil.rmtree(run_dir / "eval")
    run_on_ranks(evaluate_in_small_parts, LAYOUTS[name].num_ranks, run_dir, LAYOUTS[name])
    result, arrays = files(run_dir)
    assert result == whole[0]
    for key, value in whole[1].items():
        assert numpy.array_equal(arrays[key], value), key
    assert not list((run_dir / "eval").glob(".*unfinished*"))


def evaluate_in_small_parts(run_dir: Path, parallel: LayoutConfig) -> None:
    """As a job of a rank; three parts of pictures and five of texts, which replicas share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tower_rows, "BLOCK", 4)
        patch.setattr(tower_rows, "PART", 4)
        evaluate(run_dir, parallel)


def test_what_is_embedded_is_not_embedded_again(
    run_dir: Path, whole: tuple[bytes, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    """Stopped after two parts of pictures, a third half written; then on."""
    shutil.rmtree(run_dir / "eval")
    monkeypatch.setattr(tower_rows, "BLOCK", 4)
    monkeypatch.setattr(tower_rows, "PART", 4)
    asked = iter([False, True])
    with pytest.raises(Interrupted, match="what is embedded is safe"):
        evaluate(run_dir, LayoutConfig(), interrupt=lambda: next(asked))
    folder = run_dir / "eval" / ".test.towers.unfinished"
    assert sorted(path.name for path in folder.glob("*.npz")) == ["images-000000000.npz", "images-000000004.npz"]
    (folder / ".images-000000008.npz.tmp").write_bytes(b"half")
    embedded: list[int] = []
    embed = image_text.embed_pictures

    def counting(run: Run, images: Sequence[bytes | None], **options: Any) -> tower_rows.Embedded:
        embedded.append(len(images))
        return embed(run, images, **options)

    monkeypatch.setattr(image_text, "embed_pictures", counting)
    evaluate(run_dir, LayoutConfig())
    assert embedded == [1]  # the ninth picture
    result, arrays = files(run_dir)
    assert numpy.array_equal(arrays["image_embeddings"], whole[1]["image_embeddings"])
    assert result == whole[0]


def test_the_command_and_the_scorer_say_the_same(
    run_dir: Path, source: Path, capsys: pytest.CaptureFixture[str]
):  # fmt: skip
    """A split without questions needs no --rows; the embeddings it leaves are anybody's predictions."""
    assert main(["--run-dir", str(run_dir), "--tasks", "image_text"]) == 0
    said = capsys.readouterr().out
    assert "text_to_image_hit@1" in said and "test.towers.json" in said
    page = (run_dir / "eval" / "test.towers.html").read_text()
    assert "text_to_image_median_rank" in page and "No question was asked" in page
    figures = json.loads((run_dir / STEM).read_text())["tasks"]["image_text"]["rows"]["joint"]["figures"]
    argv = ["--task", "image_text", "--predictions", str(run_dir / NPZ), "--references", str(source), "--json", "-"]
    assert score.main(argv) == 0
    scored = json.loads(capsys.readouterr().out)
    assert len(scored) == 10 and scored == {name: figures[name]["value"] for name in scored}


def test_what_cannot_be_scored_is_said(
    data_dir: Path, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):  # fmt: skip
    def refused(run: Path, *options: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            raise SystemExit(main(["--run-dir", str(run), *options]))
        assert stopped.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    assert "coco_5k is about 5000 images, and the references have 9" in refused(run_dir, "--tasks", "coco_5k")
    assert "--rows is none, but --tasks qa scores answers" in refused(run_dir, "--tasks", "qa", "--rows", "none")
    assert "nothing to do; name --tasks" in refused(run_dir, "--rows", "none")
    assert "pairs/dev" in refused(run_dir, "--tasks", "image_text", "--split", "dev")
    blocks = save_run(data_dir, tmp_path / "blocks", "blocks")
    assert "coordinates of their own" in refused(blocks, "--tasks", "image_text")


def test_a_broken_picture_stays_in_the_pool_and_is_counted(source: Path, tmp_path: Path):
    for name in ("coco.json", "images"):
        copy = shutil.copytree if name == "images" else shutil.copy
        copy(source.parent / name, tmp_path / name)
    argv = ["coco", "--karpathy", str(tmp_path / "coco.json"), "--images", str(tmp_path / "images")]
    assert prepare.main([*argv, "--vocabulary", "300", "--out", str(tmp_path / "data"), "--workers", "1"]) == 0
    (tar,) = (tmp_path / "data" / "documents").glob("*.tar")
    whole = tar.read_bytes()
    at = whole.index(b"\xff\xd8\xff")  # where the first JPEG begins
    tar.write_bytes(whole[: at + 30] + bytes(200) + whole[at + 230 :])
    (index,) = (tmp_path / "data" / "documents").glob("*.index.safetensors")
    index.unlink()
    assert index_shards(["index", str(tmp_path / "data" / "documents")]) == 0
    run_dir = save_run(tmp_path / "data", tmp_path / "run", "mean")
    evaluate(run_dir, LayoutConfig())
    told = json.loads((run_dir / STEM).read_text())["tasks"]["image_text"]["rows"]["joint"]
    assert told["notes"] == ["pictures: 1 of the pool are not whole and stay in it: 100"]
    assert told["figures"]["image_to_text_hit@1"]["num"] == NUM
