"""Captions of pictures: CIDEr-D, BLEU-4, ROUGE-L, each named after its tokeniser (``cider_d_ptb_like``).

The short name (``cider_d``) is there too, for scripts. Document frequencies of CIDEr-D are those of the references
scored, so leaving references out changes every score; a picture without caption counts with an empty one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, get_args

import numpy

from data.document import Document
from data.samples import Pair, Sample
from rag_mm.evaluate.metric import OfSums, Scores, mean
from rag_mm.evaluate.prediction import Prediction, answers_of
from rag_mm.evaluate.prediction_files import FileError, Record, by_id, is_jsonl, read_json, read_jsonl
from rag_mm.evaluate.scoring.caption_tokens import Tokenizer, tokenize
from rag_mm.evaluate.scoring.captions import BLEU_COLUMNS, bleu_counts, bleu_of_sums, cider_d, rouge_l
from rag_mm.evaluate.tasks.task import Aligned, Question, Task

IDS = ("image_id", "id")


@dataclass(frozen=True)
class Captions(Task[str, tuple[str, ...]]):
    """One caption a picture against several.

    Attributes:
        tokenizer: see `scoring.caption_tokens`.
        split: of Karpathy's files.
    """

    tokenizer: Tokenizer = "ptb_like"
    split: str = "test"

    name: ClassVar[str] = "captions"
    about: ClassVar[str] = "captions: CIDEr-D, BLEU-4, ROUGE-L"
    references_are: ClassVar[str] = "COCO captions json {annotations}, Karpathy json, jsonl {image_id, captions}"
    predictions_are: ClassVar[str] = "COCO results json [{image_id, caption}]; jsonl of the same"

    def __post_init__(self) -> None:
        if self.tokenizer not in get_args(Tokenizer):
            raise ValueError(f"tokenizer is {self.tokenizer!r}; it must be one of {', '.join(get_args(Tokenizer))}")

    def read_references(self, paths: Sequence[Path]) -> dict[str, tuple[str, ...]]:
        found: dict[str, list[str]] = {}
        for path in paths:
            for key, texts in caption_references(path, split=self.split):
                found.setdefault(key, []).extend(texts)
        if not found:
            raise FileError(f"{', '.join(map(str, paths))}: no picture has captions")
        return {key: tuple(texts) for key, texts in found.items()}

    def read_predictions(self, path: Path) -> dict[str, str]:
        records = read_jsonl(path) if is_jsonl(path) else iter(read_json(path).array("", "annotations"))
        return by_id(((r.id(*IDS), r, r.text("caption", "text")) for r in records), what="predictions")

    def references_of(self, items: Iterable[Sample | Pair]) -> dict[str, tuple[str, ...]]:
        """The accepted answers of questions with a picture, which are its captions."""
        found = {s.id: s.answers for s in items if isinstance(s, Sample) and s.weight and s.kind == "picture"}
        if not found:
            raise ValueError("no question is about a picture")
        return found

    def predictions_of(self, predictions: Iterable[Prediction], documents: Mapping[str, Document]) -> dict[str, str]:
        return answers_of(predictions)

    def ask(self, key: str, reference: tuple[str, ...]) -> Question:
        return Question(key, "", key)

    def score(self, aligned: Aligned[str, tuple[str, ...]]) -> Scores:
        keys = list(aligned.references)
        texts = [aligned.predictions[key] or "" for key in keys]
        golds = [text for key in keys for text in aligned.references[key]]
        tokens = tokenize([*texts, *golds], self.tokenizer)
        candidates, rest = tokens[: len(texts)], iter(tokens[len(texts) :])
        references = [[next(rest) for _ in aligned.references[key]] for key in keys]
        counts = [bleu_counts(c, r) for c, r in zip(candidates, references, strict=True)]
        columns = {
            "cider_d": numpy.array(cider_d(candidates, references)),
            "rouge_l": numpy.array([rouge_l(c, r) for c, r in zip(candidates, references, strict=True)]),
            **{name: numpy.array([row[name] for row in counts], dtype=numpy.float64) for name in BLEU_COLUMNS},
        }
        on = f"on {self.tokenizer} tokens"
        names = {short: f"{short}_{self.tokenizer}" for short in ("cider_d", "bleu_4", "rouge_l")}
        metrics = (
            mean(
                names["cider_d"],
                f"CIDEr-D {on}, document frequencies of these references, 1.0 is COCO's 100",
                "cider_d",
            ),
            OfSums(names["bleu_4"], f"corpus BLEU-4 {on}, closest reference length", BLEU_COLUMNS, bleu_of_sums),
            mean(names["rouge_l"], f"ROUGE-L (beta 1.2) {on}", "rouge_l"),
        )
        empty = [key for key, c in zip(keys, candidates, strict=True) if not c and aligned.predictions[key] is not None]
        notes = [f"empty: {len(empty)} captions have no token: {', '.join(empty[:5])}"] if empty else []
        if len(keys) == 1:
            notes.append("one picture: every document frequency is 1 of 1, so CIDEr-D is 0 whatever the caption")
        sizes = sorted({len(texts) for texts in aligned.references.values()})
        return Scores(
            ids=tuple(keys),
            units=tuple(keys),
            columns=columns,
            metrics=metrics,
            context={"tokenizer": self.tokenizer, "captions_per_picture": sizes, **aligned.context()},
            notes=(*aligned.notes(), *notes),
            aliases=names,
        )


def caption_references(path: Path, *, split: str) -> Iterator[tuple[str, list[str]]]:
    """Picture and captions: once a picture of Karpathy's files and jsonl, once a caption of COCO's."""
    if is_jsonl(path):
        for record in read_jsonl(path):
            yield record.id(*IDS), list(record.texts("captions", "caption", "references"))
        return
    file = read_json(path)
    if "annotations" in file.records:
        for record in file.records["annotations"]:
            yield record.id("image_id"), [record.text("caption")]
        return
    for record in karpathy_images(file.array("images", ""), split=split):
        yield karpathy_id(record), [sentence.text("raw") for sentence in record.objects("sentences")]


def karpathy_images(records: Sequence[Record], *, split: str) -> list[Record]:
    """The pictures of one split.

    Raises:
        FileError: if there are none; names the splits that are there.
    """
    kept = [record for record in records if record.text("split") == split]
    if not kept:
        there = ", ".join(sorted({record.text("split") for record in records})) or "none"
        where = records[0].path if records else "the file"
        raise FileError(f"{where}: no picture is of split {split!r}; the splits there are: {there}")
    return kept


def karpathy_id(record: Record) -> str:
    """COCO's id of a picture where there is one, else the file's own."""
    return record.id("cocoid", "imgid", "image_id", "id")
