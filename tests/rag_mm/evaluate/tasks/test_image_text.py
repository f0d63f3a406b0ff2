"""Image-text protocols end to end: embeddings, scores and ranked lists; folds, 25,010 captions, holes in the pool."""

from pathlib import Path
from typing import Any

import numpy
import pytest

from rag_mm.evaluate.bootstrap import intervals
from rag_mm.evaluate.prediction_files import FileError
from rag_mm.evaluate.tasks.image_text import Coco1k, Coco5k, Flickr30k, ImageText
from tests.rag_mm.evaluate.tasks.files import score, write

TEXTS = {"i1": ["t1", "t2"], "i2": ["t3"], "i3": ["t4", "t5", "t6"]}
REFERENCES = [{"image_id": i, "text_ids": ts} for i, ts in TEXTS.items()]
TASK = ImageText(k=(1, 2))
# Rows: texts, columns: images.
SCORES = numpy.array([
    [0.9, 0.1, 0.2],  # t1 of i1: rank 1
    [0.3, 0.5, 0.4],  # t2 of i1: 3
    [0.8, 0.8, 0.0],  # t3 of i2: tie with i1: 2, by order 2
    [0.1, 0.2, 0.7],  # t4 of i3: 1
    [0.7, 0.6, 0.5],  # t5 of i3: 3
    [0.2, 0.1, 0.3],  # t6 of i3: 1
])  # fmt: skip
# Down the columns: i1: t1 .9 is first: 1. i2: t3 .8 is first: 1. i3: t4 .7 is first: 1.
EXPECTED = {
    "image_to_text_hit@1": 1.0, "image_to_text_hit@2": 1.0, "image_to_text_mean_rank": 1.0,
    "image_to_text_median_rank": 1.0,
    "text_to_image_hit@1": 3 / 6, "text_to_image_hit@2": 4 / 6, "text_to_image_mean_rank": 11 / 6,
    "text_to_image_median_rank": 1.5,
}  # fmt: skip


def save(path: Path, **arrays: Any) -> Path:
    ids = {"image_ids": numpy.array(list(TEXTS)), "text_ids": numpy.array([t for ts in TEXTS.values() for t in ts])}
    numpy.savez(path, **{**ids, **arrays})
    return path


def test_scores_by_hand(tmp_path: Path) -> None:
    references = write(tmp_path / "r.jsonl", REFERENCES)
    found = score(TASK, save(tmp_path / "p.npz", scores=SCORES), references)
    assert found.results() == pytest.approx(EXPECTED)
    assert not found.notes and found.context["ties"] == "pessimistic"
    assert found.units[3:] == ("i1", "i1", "i2", "i3", "i3", "i3")
    low, high = intervals(found, draws=300)["text_to_image_median_rank"]
    assert 1 <= low <= 1.5 <= high <= 3


def test_embeddings_are_scores(tmp_path: Path) -> None:
    references = write(tmp_path / "r.jsonl", REFERENCES)
    arrays = {"image_embeddings": numpy.eye(3), "text_embeddings": SCORES}
    assert score(TASK, save(tmp_path / "p.npz", **arrays), references).results() == pytest.approx(EXPECTED)
    # the order of the file does not matter
    back = {
        "image_ids": numpy.array(["i3", "i2", "i1"]),
        "image_embeddings": numpy.eye(3)[::-1],
        "text_embeddings": SCORES,
    }
    assert score(TASK, save(tmp_path / "q.npz", **back), references).results() == pytest.approx(EXPECTED)


def test_k_beyond_the_pool_and_captions_that_are_the_same(tmp_path: Path) -> None:
    """Every text is the same vector: all tie, so the right one stands last of its pool, and everything is within it."""
    references = write(tmp_path / "r.jsonl", REFERENCES)
    arrays = {"image_embeddings": numpy.ones((3, 2)), "text_embeddings": numpy.ones((6, 2))}
    found = score(ImageText(k=(1, 5, 10)), save(tmp_path / "p.npz", **arrays), references).results()
    assert found["text_to_image_mean_rank"] == 3.0  # of three images
    assert (found["text_to_image_hit@1"], found["text_to_image_hit@5"], found["text_to_image_hit@10"]) == (
        0.0,
        1.0,
        1.0,
    )
    # of six texts, the first of an image's own stands behind those of the others: places 5, 6 and 4
    assert (found["image_to_text_hit@1"], found["image_to_text_mean_rank"]) == (0.0, 5.0)
    assert (found["image_to_text_hit@5"], found["image_to_text_hit@10"]) == (pytest.approx(2 / 3), 1.0)


def lists() -> list[dict[str, Any]]:
    images, texts = list(TEXTS), [t for ts in TEXTS.values() for t in ts]
    down = [{"image_id": i, "texts": [texts[n] for n in numpy.argsort(-SCORES[:, j])]} for j, i in enumerate(images)]
    across = [
        {"text_id": t, "images": [images[n] for n in numpy.argsort(-row)]} for t, row in zip(texts, SCORES, strict=True)
    ]
    across[2]["images"] = ["i1", "i2", "i3"]
    return down + across


def test_ranked_lists(tmp_path: Path) -> None:
    references = write(tmp_path / "r.jsonl", REFERENCES)
    found = score(TASK, write(tmp_path / "p.jsonl", lists()), references)
    assert found.results() == pytest.approx(EXPECTED)
    assert found.context["ties"] == "as listed"


def test_short_and_missing_lists(tmp_path: Path) -> None:
    rows = [row for row in lists() if row.get("text_id") != "t4"]
    for row in rows:
        if row.get("text_id") == "t5":
            row["images"] = row["images"][:2]
    path = write(tmp_path / "p.jsonl", [*rows, {"text_id": "t9", "images": []}])
    found = score(TASK, path, write(tmp_path / "r.jsonl", REFERENCES))
    assert found.results()["text_to_image_hit@1"] == pytest.approx(2 / 6)
    assert "text_to_image_mean_rank" not in found.results()
    assert found.notes == (
        "missing: 1 queries have no list and count as not found: text:t4",
        "extra: 1 lists are of no query and ignored: text:t9",
        "short lists: 1 do not reach their right item; no mean and median rank",
    )
    with pytest.raises(ValueError, match="1 queries have no list: text:t4"):
        score(TASK, path, tmp_path / "r.jsonl", missing="refuse")
    with pytest.raises(ValueError, match="would make the pool another one"):
        score(TASK, path, tmp_path / "r.jsonl", missing="leave_out")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "array image_embeddings is missing"),
        ({"scores": SCORES.T}, r"array scores is float64 of shape \(3, 6\); it must be float of shape \(6, 3\)"),
        ({"scores": SCORES.astype(int)}, "array scores is int64"),
        ({"scores": numpy.where(SCORES == 0.9, numpy.nan, SCORES)}, "holds a NaN or infinity in row 0"),
        (
            {"scores": SCORES[:, :2], "image_ids": numpy.array(["i1", "i2"])},
            "1 of 3 images .* not in the predictions: i3",
        ),
        ({"scores": SCORES, "image_ids": numpy.array(["i1", "i2", "i2"])}, "array image_ids names an id twice"),
        ({"image_embeddings": numpy.eye(3), "text_embeddings": SCORES[:, :2]}, "array text_embeddings is"),
        ({"scores": numpy.array([[object()]])}, "cannot be read as npz without pickles"),
    ],
)
def test_mistakes_in_npz(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(FileError, match=message):
        score(TASK, save(tmp_path / "p.npz", **arrays), write(tmp_path / "r.jsonl", REFERENCES))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"image_id": "i1", "images": ["i2"]}, "field texts is missing"),
        ({"image_id": "i1", "texts": ["t1", "t1"]}, "names an id twice"),
        ({"texts": ["t1"]}, "field image_id or text_id is missing|field images is missing"),
    ],
)
def test_mistakes_in_lists(tmp_path: Path, line: dict, message: str) -> None:
    with pytest.raises(FileError, match=message):
        score(TASK, write(tmp_path / "p.jsonl", [line]), write(tmp_path / "r.jsonl", REFERENCES))


def test_mistakes_in_references(tmp_path: Path) -> None:
    both = write(tmp_path / "r.jsonl", [{"image_id": 1, "text_ids": [7]}, {"image_id": 2, "text_ids": [7]}])
    with pytest.raises(FileError, match="text '7' belongs to image '1' and to '2'"):
        TASK.read_references([both])
    with pytest.raises(FileError, match="about 5000 images, and the references have 3; use --task image_text"):
        Coco5k().read_references([write(tmp_path / "s.jsonl", REFERENCES)])


def coco(num_images: int, more: int) -> dict[str, Any]:
    """Five captions an image, six for the first ``more`` images; caption ids are those of images too, as in COCO."""
    texts = [(image, n) for image in range(num_images) for n in range(6 if image < more else 5)]
    return {
        "images": [{"id": image} for image in range(num_images)],
        "annotations": [{"image_id": image, "id": i, "caption": "x"} for i, (image, _) in enumerate(texts)],
    }


def embeddings(path: Path, annotations: dict[str, Any], *, noise: float) -> Path:
    """Images are random directions, texts are near theirs."""
    generator = numpy.random.default_rng(0)
    images = generator.normal(size=(len(annotations["images"]), 8)).astype(numpy.float32)
    images /= numpy.linalg.norm(images, axis=1, keepdims=True)
    owner = numpy.array([a["image_id"] for a in annotations["annotations"]])
    texts = images[owner] + noise * generator.normal(size=(len(owner), 8)).astype(numpy.float32)
    arrays = {"image_ids": numpy.arange(len(images)), "text_ids": numpy.arange(len(owner))}
    numpy.savez(path, **arrays, image_embeddings=images, text_embeddings=texts)
    return path


class Small5k(Coco5k):
    num_images = 60


class Small1k(Coco1k):
    num_images = 60
    fold_size = 12


def test_five_captions_are_kept_and_folds_are_pools_of_their_own(tmp_path: Path) -> None:
    """A small copy of COCO's protocols; slow twin: each fold scored apart as a pool, and averaged."""
    annotations = coco(60, 10)
    references = write(tmp_path / "captions.json", annotations)
    predictions = embeddings(tmp_path / "p.npz", annotations, noise=0.4)
    whole = score(Small5k(), predictions, references)
    assert (whole.context["num_images"], whole.context["num_texts"]) == (60, 300)
    assert whole.notes == (
        "captions: 10 beyond the first 5 of an image are dropped",
        "extra: 10 texts are not in the references and ignored: 11, 17, 23, 29, 35 and 5 more",
    )
    parts = score(Small1k(), predictions, references).results()
    assert parts["text_to_image_hit@1"] > whole.results()["text_to_image_hit@1"]
    arrays = dict(numpy.load(predictions))
    apart = []
    for fold in range(5):
        kept: dict[int, list[int]] = {image: [] for image in range(12 * fold, 12 * (fold + 1))}
        for a in annotations["annotations"]:
            if a["image_id"] in kept and len(kept[a["image_id"]]) < 5:
                kept[a["image_id"]].append(a["id"])
        texts = numpy.array([t for ts in kept.values() for t in ts])
        numpy.savez(
            tmp_path / "fold.npz",
            image_ids=numpy.array(list(kept)),
            text_ids=texts,
            image_embeddings=arrays["image_embeddings"][list(kept)],
            text_embeddings=arrays["text_embeddings"][texts],
        )
        rows = [{"image_id": image, "text_ids": texts} for image, texts in kept.items()]
        apart.append(score(ImageText(), tmp_path / "fold.npz", write(tmp_path / "fold.jsonl", rows)).results())
    for name, value in parts.items():
        assert value == pytest.approx(numpy.mean([fold[name] for fold in apart])), name


def test_lists_of_the_whole_pool_are_cut_to_folds(tmp_path: Path) -> None:
    """Without the items of other folds, and of none, the lists give the ranks of the embeddings they were made from."""
    annotations = coco(60, 0)
    references = write(tmp_path / "captions.json", annotations)
    predictions = embeddings(tmp_path / "p.npz", annotations, noise=0.4)
    arrays = dict(numpy.load(predictions))
    scores = arrays["text_embeddings"] @ arrays["image_embeddings"].T
    rows: list[dict[str, Any]] = [
        {"image_id": i, "texts": ["of no image", *numpy.argsort(-scores[:, i]).tolist()]} for i in range(60)
    ]
    rows += [{"text_id": t, "images": numpy.argsort(-scores[t]).tolist()} for t in range(300)]
    found = score(Small1k(), write(tmp_path / "lists.jsonl", rows), references).results()
    assert found == pytest.approx(score(Small1k(), predictions, references).results())


@pytest.mark.slow
def test_coco_at_its_size(tmp_path: Path) -> None:
    annotations = coco(5000, 10)
    assert len(annotations["annotations"]) == 25010
    references = write(tmp_path / "captions.json", annotations)
    predictions = embeddings(tmp_path / "p.npz", annotations, noise=0.3)
    whole, parts = score(Coco5k(), predictions, references), score(Coco1k(), predictions, references)
    assert whole.context["num_texts"] == parts.context["num_texts"] == 25000
    for way in ("image_to_text", "text_to_image"):
        assert parts.results()[f"{way}_hit@1"] > whole.results()[f"{way}_hit@1"]


def test_flickr_is_about_a_thousand_images_with_five_captions(tmp_path: Path) -> None:
    annotations = coco(1000, 0)
    references = write(tmp_path / "captions.json", annotations)
    found = score(Flickr30k(k=(1,)), embeddings(tmp_path / "p.npz", annotations, noise=0.05), references)
    assert found.context["num_texts"] == 5000 and found.results()["image_to_text_hit@1"] > 0.5
    annotations["annotations"].pop()
    with pytest.raises(FileError, match="needs 5 captions an image; fewer have 999"):
        Flickr30k().read_references([write(tmp_path / "few.json", annotations)])
