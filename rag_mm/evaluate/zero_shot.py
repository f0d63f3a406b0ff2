"""Zero-shot classification by a run's own towers: the pictures of a split's questions, their labels as the classes.

A label is the first accepted answer of a question with a picture; the question's words are not shown. A class is the
mean of its prompts' embeddings, each of unit length, embedded as documents without pictures; a picture is embedded as a
question without words (`rag_mm.evaluate.tower_rows`), and its classes are ranked by the inner product. What counts and
what is reported is `rag_mm.evaluate.tasks.zero_shot`'s, as for anybody's predictions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy

from data.dataset import digest
from rag_mm.evaluate.answer import Run
from rag_mm.evaluate.questions import Questions
from rag_mm.evaluate.scoring.zero_shot import class_embeddings, prompts
from rag_mm.evaluate.tasks.task import named
from rag_mm.evaluate.tasks.zero_shot import Guess, ZeroShot
from rag_mm.evaluate.tower_rows import embed_pictures, embed_texts, in_parts


def labels(questions: Questions, task: ZeroShot) -> dict[str, str]:
    """The label of every question with a picture.

    Raises:
        ValueError: if there is none, or a label is not among the task's classes.
    """
    found = task.references_of(questions.words)
    if not found:
        raise ValueError(
            f"--tasks names {task.name}, but {questions.name} has no question with a picture and an answer"
        )
    for name, label in found.items():
        if task.classes and label not in task.classes:
            raise ValueError(f"--tasks: the label {label!r} of {name} is not among the classes of {task.name}")
    return found


def guesses(
    run: Run,
    questions: Questions,
    task: ZeroShot,
    folder: Path,
    *,
    progress: Callable[[int], None],
    interrupt: Callable[[], bool] | None = None,
) -> tuple[dict[str, Guess], list[str]] | None:
    """All classes of every picture with their scores, and sentences about what was not as it should be; on the first
    rank, None on the others.

    Args:
        folder: keeps what is done.
        progress: called with a number of pictures or prompts that are done.

    Raises:
        Interrupted: on every rank, if any was asked to stop.
    """
    right = labels(questions, task)
    asked = [sample for sample in questions.words if sample.id in right]
    classes = task.classes or tuple(sorted(set(right.values())))
    texts = [text for name in classes for text in prompts(name, task.templates)]
    images = in_parts(
        run, f"pictures-{digest(sample.id for sample in asked)}", len(asked), folder,
        lambda rows: embed_pictures(
            run, [sample.image for sample in questions.of(asked[rows.start : rows.stop])], side="query", broken={}
        ),
        progress=progress, interrupt=interrupt,
    )  # fmt: skip
    words = in_parts(
        run, f"prompts-{digest(texts)}", len(texts), folder,
        lambda rows: embed_texts(run, texts[rows.start : rows.stop], side="document"),
        progress=progress, interrupt=interrupt,
    )  # fmt: skip
    if images is None or words is None:
        return None
    row = {text: words.embedding[i] for i, text in enumerate(texts)}
    class_CE = class_embeddings(lambda own: numpy.stack([row[text] for text in own]), classes, task.templates)
    scores_NC = images.embedding @ class_CE.T
    found = {
        sample.id: Guess(scores=dict(zip(classes, scores.tolist(), strict=True)))
        for sample, scores in zip(asked, scores_NC, strict=True)
    }
    notes = [f"prompts: {words.truncated} of {len(texts)} truncated"] if words.truncated else []
    if images.broken.any():
        names = [asked[i].id for i in numpy.flatnonzero(images.broken)]
        notes.append(f"pictures: {len(names)} cannot be decoded and are ranked as if they were blank: {named(names)}")
    return found, notes
