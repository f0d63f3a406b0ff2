"""The tasks that a run's towers are scored by without asking its reader anything, together.

`rag_mm.evaluate.image_text` and `rag_mm.evaluate.zero_shot` say what is embedded; here it is scored and written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rag_mm.evaluate import image_text, zero_shot
from rag_mm.evaluate.answer import Run
from rag_mm.evaluate.questions import Questions
from rag_mm.evaluate.rows import row_of
from rag_mm.evaluate.scoring.zero_shot import prompts
from rag_mm.evaluate.task_scores import of_towers
from rag_mm.evaluate.tasks.image_text import ImageText
from rag_mm.evaluate.tasks.task import Aligned, Task
from rag_mm.evaluate.tasks.zero_shot import ZeroShot
from rag_mm.evaluate.tower_rows import check_space


class TowerTasks:
    """Some of them, on a split.

    Attributes:
        num_rows: that will be embedded.

    Raises:
        ValueError: if the towers compare no words with pictures, or the split does not hold what a task is about.
    """

    def __init__(self, run: Run, tasks: Sequence[Task[Any, Any]], split: str, questions: Questions) -> None:
        check_space(run)
        self._run, self._split, self._questions = run, split, questions
        self._pools = [task for task in tasks if isinstance(task, ImageText)]
        self._classes = [task for task in tasks if isinstance(task, ZeroShot)]
        self._pool = image_text.make_pool(run.dataset, split, self._pools) if self._pools else None
        self.num_rows = 0 if self._pool is None else self._pool.num_rows
        for task in self._classes:
            labels = zero_shot.labels(questions, task)
            classes = task.classes or set(labels.values())
            self.num_rows += len(labels) + len(classes) * len(prompts("x", task.templates))

    def scored(
        self,
        parts: Path,
        results: Path,
        *,
        progress: Callable[[int], None],
        interrupt: Callable[[], bool] | None = None,
    ) -> dict[str, Any]:
        """By task what `task_scores.of_towers` says, on the first rank; all ranks call it.

        Args:
            parts: keeps what is embedded until all is done.
            results: gets the embeddings of image-text retrieval, for `rag_mm.evaluate.score`.
            progress: called with a number of rows that are done.

        Raises:
            Interrupted: the same call goes on.
        """
        found: dict[str, Any] = {}
        row = row_of(self._run.config)
        if self._pool is not None:
            made = image_text.embed_pool(
                self._run, self._pool, self._split, parts, progress=progress, interrupt=interrupt
            )  # fmt: skip
            if made is not None:
                similarities, notes = made
                image_text.write_embeddings(results / f"{self._split}.image_text.npz", similarities)
                for pool_task in self._pools:
                    scores = pool_task.score(Aligned(self._pool.references, {"": similarities}))
                    found[pool_task.name] = of_towers(pool_task, scores, row=row, notes=notes)
        for task in self._classes:
            told = zero_shot.guesses(
                self._run, self._questions, task, parts, progress=progress, interrupt=interrupt
            )  # fmt: skip
            if told is not None:
                guesses, notes = told
                scores = task.score(Aligned(zero_shot.labels(self._questions, task), guesses))
                found[task.name] = of_towers(task, scores, row=row, notes=notes)
        return found
