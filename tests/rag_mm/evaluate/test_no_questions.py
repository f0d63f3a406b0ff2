"""A split without questions is refused first, and the message names the split that has some."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from rag_mm.evaluate.evaluation import evaluate_run, require_questions
from rag_mm.evaluate.questions import QuestionsConfig


def dataset(**counts: int) -> Any:
    return SimpleNamespace(directory="data/nq", questions=lambda split: range(counts.get(split, 0)))


def test_the_split_that_has_questions_is_named():
    require_questions(dataset(test=1), "test")
    with pytest.raises(ValueError, match=r"^the test split of data/nq has no questions; --split dev has 6$"):
        require_questions(dataset(dev=6), "test")
    with pytest.raises(ValueError, match=r"^the dev split of data/nq has no questions$"):
        require_questions(dataset(train=3), "dev")


def test_nothing_is_embedded_or_locked_before():
    run = SimpleNamespace(dataset=dataset(dev=6))  # has nothing else that could be asked
    with pytest.raises(ValueError, match="--split dev has 6"):
        evaluate_run(cast(Any, run), ["joint"], QuestionsConfig(), console=Console(quiet=True))
