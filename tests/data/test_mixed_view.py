"""Questions of several data sets, whose memory is that of one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.config import DataConfig
from data.dataset import Dataset
from data.mixed_view import MixedView, check_mixed, mixed_datasets, training_questions
from tests.data.small_datasets import question, write_dataset


def mixed(root: Path, other: dict[str, bytes]) -> tuple[DataConfig, Dataset, dict[str, Dataset]]:
    first = write_dataset(root / "first", [("a0", question()), ("a1", question())], documents=["c", "d"])
    second = write_dataset(root / "second", [("b0", question()), ("b1", other)], documents=["c", "d", "x"])
    Dataset(first).store.edit("d", "f", "new")
    settings = DataConfig(dir=str(first), mixture={str(first): 1, str(second): 1}, at_edit=1)
    dataset = Dataset.of(settings)
    return settings, dataset, mixed_datasets(settings, dataset)


def test_questions_are_laid_end_to_end_and_the_edit_is_that_of_the_memory(tmp_path: Path):
    settings, dataset, others = mixed(tmp_path, question(hard_negatives=["d"]))
    check_mixed(others, dataset)
    view = training_questions(dataset, others)
    assert isinstance(view, MixedView) and list(others) == list(settings.mixture)
    assert [sample.id for sample in view.read([3, 0, 2, 3])] == ["b1", "a0", "b0", "b1"]
    assert [sample.id for sample in view] == ["a0", "a1", "b0", "b1"]
    assert dataset.store.num_edits == 1  # the second has none, and opens all the same
    assert view.bad.num_read == 3


@pytest.mark.parametrize("name", ["gold", "hard_negatives"])
def test_documents_that_only_the_other_memory_holds_are_refused(name: str, tmp_path: Path):
    _, dataset, others = mixed(tmp_path, question(**{"gold": ["c"], name: ["c", "x"]}))
    with pytest.raises(ValueError, match=r"b1 of .*second names document 'x', which is not in the store .*first"):
        check_mixed(others, dataset)
