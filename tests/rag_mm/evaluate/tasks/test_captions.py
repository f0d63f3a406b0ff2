"""COCO's files end to end, against pycocoevalcap on the same tokens."""

from pathlib import Path
from typing import Any

import numpy
import pytest
from pycocoevalcap.cider.cider import Cider

from rag_mm.evaluate.bootstrap import intervals
from rag_mm.evaluate.prediction_files import FileError
from rag_mm.evaluate.scoring.caption_tokens import has_ptb
from rag_mm.evaluate.tasks.captions import Captions
from tests.rag_mm.evaluate.tasks.files import score, write

CAPTIONS = {
    1: ["A man's dog runs.", "A dog is running in the park.", "A dog is running in the park."],
    2: ["Two cats sleep on a red mat!", "cats, sleeping"],
    3: ["The street at night"],
}
RESULTS = {1: "a dog runs in the park", 2: "Two cats sleep on a red mat.", 3: "a bus"}
COCO = {
    "images": [{"id": i} for i in CAPTIONS],
    "annotations": [
        {"image_id": i, "id": 10 * i + n, "caption": c} for i, cs in CAPTIONS.items() for n, c in enumerate(cs)
    ],
}
COCO_RESULTS = [{"image_id": i, "caption": c} for i, c in RESULTS.items()]
KARPATHY = {
    "images": [
        {"cocoid": i, "split": "test", "sentences": [{"raw": c, "sentid": 10 * i + n} for n, c in enumerate(cs)]}
        for i, cs in CAPTIONS.items()
    ]
    + [{"cocoid": 9, "split": "train", "sentences": [{"raw": "no", "sentid": 99}]}]
}


@pytest.mark.parametrize(
    ("references", "name", "predictions", "predictions_name"),
    [
        (COCO, "captions.json", COCO_RESULTS, "results.json"),
        (KARPATHY, "dataset_coco.json", COCO_RESULTS, "results.jsonl"),
        ([{"image_id": i, "captions": cs} for i, cs in CAPTIONS.items()], "r.jsonl", COCO_RESULTS, "results.json"),
    ],
)
def test_formats(tmp_path: Path, references: Any, name: str, predictions: Any, predictions_name: str) -> None:
    found = score(Captions(), write(tmp_path / predictions_name, predictions), write(tmp_path / name, references))
    tokens = {
        1: ["a man 's dog runs"] + 2 * ["a dog is running in the park"],
        2: ["two cats sleep on a red mat", "cats sleeping"],
    }
    tokens[3] = ["the street at night"]
    results = {i: [c.lower().rstrip(".")] for i, c in RESULTS.items()}
    theirs, _ = Cider().compute_score(tokens, results)
    assert found.results()["cider_d_ptb_like"] == pytest.approx(theirs)
    assert list(found.results()) == ["cider_d_ptb_like", "bleu_4_ptb_like", "rouge_l_ptb_like"]
    assert found.aliases["cider_d"] == "cider_d_ptb_like"
    assert found.context["captions_per_picture"] == [1, 2, 3]


@pytest.mark.skipif(not has_ptb(), reason="needs Java on the path")
def test_the_tokeniser_is_part_of_the_name(tmp_path: Path) -> None:
    paths = write(tmp_path / "p.json", COCO_RESULTS), write(tmp_path / "r.json", COCO)
    ptb, like = score(Captions(tokenizer="ptb"), *paths).results(), score(Captions(), *paths).results()
    assert list(ptb) == ["cider_d_ptb", "bleu_4_ptb", "rouge_l_ptb"]
    assert list(ptb.values()) == pytest.approx(list(like.values()))  # these sentences have the same tokens
    plain = score(Captions(tokenizer="whitespace"), *paths).results()
    assert plain["rouge_l_whitespace"] < ptb["rouge_l_ptb"]  # "mat." is not "mat!"


def test_missing_and_empty_captions(tmp_path: Path) -> None:
    predictions = write(tmp_path / "p.json", [{"image_id": 1, "caption": "..."}, {"image_id": 2, "caption": "x"}])
    found = score(Captions(), predictions, write(tmp_path / "r.json", COCO))
    assert found.notes == (
        "missing: 1 of 3 references have no prediction and count as wrong: 3",
        "empty: 1 captions have no token: 1",
    )
    assert found.columns["cider_d"].tolist()[0] == found.columns["cider_d"].tolist()[2] == 0.0


def test_bleu_is_resampled_as_a_corpus(tmp_path: Path) -> None:
    """Not a mean of sentences: the interval holds the corpus figure, and one image alone has its own."""
    found = score(Captions(), write(tmp_path / "p.json", COCO_RESULTS), write(tmp_path / "r.json", COCO))
    low, high = intervals(found, draws=500)["bleu_4_ptb_like"]
    assert low <= found.results()["bleu_4_ptb_like"] <= high
    bleu = found.metrics[1]
    alone = bleu.over(bleu.stack(found.columns), numpy.array([[0.0, 1.0, 0.0]]))
    assert alone[0] == pytest.approx(1.0, abs=1e-6)  # image 2 copies a reference


@pytest.mark.parametrize(
    ("predictions", "message"),
    [
        (
            '[{"image_id": 1, "caption": "x"},\n{"image_id": 1, "caption": "y"}]',
            r"p\.json:2 \(\[1\]\): id '1' occurs twice",
        ),
        ('[{"image_id": 1, "caption": null}]', "field caption or text is missing"),
        ('{"image_id": 1, "caption": "x"}', "a list of objects"),
    ],
)
def test_mistakes(tmp_path: Path, predictions: str, message: str) -> None:
    with pytest.raises(FileError, match=message):
        score(Captions(), write(tmp_path / "p.json", predictions), write(tmp_path / "r.json", COCO))


def test_a_split_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no picture is of split 'val'; the splits there are: test, train"):
        Captions(split="val").read_references([write(tmp_path / "k.json", KARPATHY)])


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="tokenizer is 'nltk'; it must be one of ptb_like, ptb, whitespace"):
        Captions(tokenizer="nltk")  # type: ignore[arg-type]
