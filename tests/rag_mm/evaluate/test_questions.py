"""Questions are held by their words; pictures are read again when it is their turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from data.dataset import Dataset, Sample, SplitView
from data.document import Document, to_sample
from data.shards import write_shards
from rag_mm.evaluate import answer, baselines
from rag_mm.evaluate.answer import Answerer, Run
from rag_mm.evaluate.judging import score, seen_answers
from rag_mm.evaluate.questions import Questions, QuestionsConfig, words_of
from rag_mm.evaluate.task_scores import find_tasks


def test_items_and_slices_are_those_of_the_split(factbook: Dataset) -> None:
    view, questions = factbook.questions("test"), QuestionsConfig().of(factbook)
    whole = list(view)
    assert list(questions) == whole and questions[:70] == whole[:70] and questions[-1] == whole[-1]
    assert [s.id for s in questions.words] == view.ids and all(s.image is None for s in questions.words)
    pictured = [s for s in whole if s.image is not None]
    assert len(pictured) > 20
    some = [questions.words[whole.index(sample)] for sample in pictured[:5]]
    assert questions.of(some) == pictured[:5] != some
    assert words_of(whole) is whole and words_of(questions) is questions.words


def test_some_are_chosen_by_a_hash_of_their_ids(factbook: Dataset) -> None:
    whole, some = QuestionsConfig().of(factbook), QuestionsConfig("test", 10).of(factbook)
    assert len(some) == 10 and {s.id for s in some} < {s.id for s in whole.words}
    assert [s.id for s in some] == [s.id for s in some.words]
    assert [s.id for s in QuestionsConfig("test", 3).of(factbook).words] == [s.id for s in some.words[:3]]


def test_the_name_of_the_result_files_says_which() -> None:
    names = [QuestionsConfig(*arguments).name for arguments in (("test",), ("dev",), ("test", 10), ("dev", 5))]
    assert names == ["test", "dev", "test-10", "dev-5"]


class Watched(SplitView[Sample]):
    """Tells how many samples were read together."""

    def __init__(self, view: SplitView[Sample]) -> None:
        vars(self).update(vars(view))
        self.together: list[int] = []

    def read_unlooked(self, places: Sequence[int]) -> list[Sample]:
        self.together.append(len(places))
        return super().read_unlooked(places)


def test_few_pictures_are_in_memory_together(run: Run, factbook: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions and what is kept of them are the same as from a list that holds all of it."""
    view = Watched(factbook.questions("test"))
    questions = Questions(view, 20)
    listed = list(questions)
    view.together.clear()
    monkeypatch.setattr(answer, "WINDOW", 8)
    monkeypatch.setattr(baselines, "AT_ONCE", 8)
    answerer = Answerer(run.config, run.dataset, run.model, None, batch_size=4)
    told = answerer.answer(questions, "gold")
    assert view.together == [8, 8, 4]
    assert told == answerer.answer(listed, "gold")
    assert baselines.pixels(factbook, questions) == baselines.pixels(factbook, listed)
    assert view.together == [8, 8, 4] * 2
    kept = score(questions, told, seen_answers(factbook))
    assert all(item.sample.image is None for item in kept)
    again = score(listed, told, seen_answers(factbook))
    assert [item.record("joint") for item in kept] == [item.record("joint") for item in again]


def test_pixels_over_a_memory_without_pictures_find_nothing(factbook: Dataset, tmp_path: Path) -> None:
    write_shards(tmp_path / "documents", [to_sample(Document("a", "A", {})), to_sample(Document("b", "B", {}))])
    memory = Dataset(str(factbook.directory), documents=str(tmp_path / "documents"))
    asked = [sample for sample in QuestionsConfig("test", 5).of(factbook)]
    assert any(sample.image is not None for sample in asked)
    found = baselines.pixels(memory, asked)
    assert [p.id for p in found] == [s.id for s in asked] and all(p.document_ids == () for p in found)


def test_kinds_of_questions_are_known_without_their_pictures(factbook: Dataset) -> None:
    questions = QuestionsConfig("test", 20).of(factbook)
    for task in find_tasks(["retrieval", "qa", "vqa"]):
        assert task.references_of(questions.words) == task.references_of(list(questions))
    kinds = {reference.kind for reference in find_tasks(["retrieval"])[0].references_of(questions.words).values()}
    assert kinds == {"picture", "text"}
