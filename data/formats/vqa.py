"""VQA and OK-VQA: questions about COCO's pictures, ten answers each (1505.00468, 1906.00067).

Questions are ``{data_subtype, questions: [{image_id, question, question_id}]}``, annotations ``{annotations:
[{question_id, image_id, question_type, answer_type, multiple_choice_answer, answers: [{answer, answer_confidence,
answer_id}]}]}``. All ten answers stay in ``meta["answers"]``, in their order, because VQA accuracy counts them;
``answers`` has each once, the commonest first. ``field`` is the type of the question where there is one, else of the
answer. Neither says what to read: ``--memory`` names documents, and without it the memory are the pictures themselves,
which serves a run that reads nothing (``train.documents none``).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from data.document_store import Document
from data.formats import pictures
from data.formats.format import SPLITS, Format, Item, Piece, Work, file, option, require, split_sources
from data.formats.id_tables import LineTable, hash_of
from data.formats.lines import SourceFile, top_level, write_atomically
from data.formats.pictures import BadPicture
from data.formats.rows import Row, json_row
from data.samples import Sample


@dataclass(frozen=True, kw_only=True)
class Vqa(Format):
    """Questions about pictures, answered by ten people."""

    name: ClassVar[str] = "vqa"
    summary: ClassVar[str] = "VQA, OK-VQA: questions and annotations json (ten answers), and the folder of pictures"
    rows_per_shard: ClassVar[int] = 10_000

    images: Path = option("folder of pictures, flat or with train2014/ and so on in it", type=Path, metavar="DIR")
    train_questions: Path | None = file("questions of train")
    train_annotations: Path | None = file("annotations of train")
    dev_questions: Path | None = file("questions of dev (VQA calls it val)")
    dev_annotations: Path | None = file("annotations of dev")
    test_questions: Path | None = file("questions of test")
    test_annotations: Path | None = file("annotations of test, where they are known")

    def _given(self, what: str) -> dict[str, Path | None]:
        return {split: getattr(self, f"{split}_{what}") for split in SPLITS}

    def sources(self) -> list[SourceFile]:
        questions, annotations = self._given("questions"), self._given("annotations")
        require(any(questions.values()), "give --train-questions, --dev-questions or --test-questions")
        for split in SPLITS:
            require(
                questions[split] is not None or annotations[split] is None,
                f"--{split}-annotations needs --{split}-questions",
            )
        return [
            *split_sources("questions", {s: [p] for s, p in questions.items() if p}, array="questions"),
            *split_sources("annotations", {s: [p] for s, p in annotations.items() if p}, array="annotations"),
        ]

    def derive(self, work: Work) -> list[SourceFile]:
        for split, path in self._given("questions").items():
            if path is not None:
                subtype = top_level(path, "data_subtype")
                write_atomically(work.folder / f"subtype-{split}.txt", subtype if isinstance(subtype, str) else "")
                self._table(work, split)
        target = work.folder / "pictures.jsonl"
        if not target.exists():
            self._list_pictures(work, target)
        return [SourceFile("pictures", target)]

    def _list_pictures(self, work: Work, target: Path) -> None:
        """The questions that are the first about their picture."""
        known: set[int] = set()
        temporary = target.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as out:
            for split in SPLITS:
                lines = work.lines.get(f"questions/{split}-0")
                if lines is None:
                    continue
                for number, text in lines.read_all():
                    row = json_row(text, lines.place(number))
                    found = hash_of(row.id("image_id"))
                    if found not in known:
                        known.add(found)
                        first = {"split": split, "image_id": row.id("image_id")}
                        out.write(json.dumps(first, ensure_ascii=False) + "\n")
        temporary.replace(target)

    def pieces(self, work: Work) -> list[Piece]:
        questions = [
            p
            for s in SPLITS
            if f"questions/{s}-0" in work.lines
            for p in work.pieces_of(f"questions/{s}", f"questions/{s}-0")
        ]
        return work.pieces_of("documents", "pictures") + questions

    def read(self, piece: Piece, work: Work) -> Iterator[Item]:
        table = self._table(work, piece.split) if piece.folder != "documents" else None
        for number, text, place in work.read(piece):
            row = json_row(text, place)
            split = row.text("split") if piece.folder == "documents" else piece.split
            image = self._picture(row.id("image_id"), (work.folder / f"subtype-{split}.txt").read_text())
            if isinstance(image, BadPicture):
                work.report.leave_out(image, place)
            elif piece.folder == "documents":
                yield number, Document(row.id("image_id"), "", {}, image)
            else:
                yield (
                    number,
                    _question(row, table, image, annotated=self._given("annotations")[piece.split] is not None),
                )

    def _picture(self, image_id: str, subtype: str) -> bytes | BadPicture:
        padded = image_id.zfill(12)
        names = [f"COCO_{subtype}_{padded}.jpg"] if subtype else []
        names += [f"{padded}.jpg", f"{image_id}.jpg"]
        candidates = [name for n in names for name in (f"{subtype}/{n}", n) if subtype or "/" not in name]
        found = next((name for name in candidates if (self.images / name).is_file()), candidates[0])
        return pictures.read(self.images, found)

    def _table(self, work: Work, split: str) -> LineTable | None:
        lines = work.lines.get(f"annotations/{split}-0")
        if lines is None:
            return None
        key = lambda text, place: json_row(text, place).id("question_id")  # noqa: E731
        return LineTable(lines, work.folder, f"annotations-{split}", key)


def _question(row: Row, table: LineTable | None, image: bytes, *, annotated: bool) -> Sample:
    name = row.id("question_id")
    answers: list[str] = []
    found: Mapping[str, Any] = {}
    field = ""
    if table is not None:
        lines = list(table.lines_of(name))
        if len(lines) != 1:
            row.fail(f"question {name} has {len(lines)} annotations; it must have one")
        annotation = json_row(lines[0][1], lines[0][2])
        if annotation.id("image_id", row.id("image_id")) != row.id("image_id"):
            annotation.fail(f"image_id is {annotation.id('image_id')}, but {row.id('image_id')} in {row.place}")
        answers = [answer.text("answer") for answer in annotation.rows("answers")]
        field = annotation.line("question_type", "") or annotation.line("answer_type", "")
        found = annotation.values
    count = Counter(answers)
    best = found.get("multiple_choice_answer")
    ranked = sorted(count, key=lambda answer: (answer != best, -count[answer]))
    return Sample(
        id=name,
        question=row.line("question"),
        answers=tuple(ranked),
        kind="picture",
        field=field,
        subject="",
        gold=(),
        image=image,
        meta={**row.rest(), "image_id": row.id("image_id"), **{k: v for k, v in found.items() if k != "question_id"}},
    )
