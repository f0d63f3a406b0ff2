"""Where a run's documents lie, and as of which edit, is what its configuration says."""

import math
from pathlib import Path

import pytest

from data.config import DataConfig
from data.dataset import Dataset
from rag_mm.evaluate.fact_edit import copy_dataset
from tests.data.stores import to_memory


def test_documents_are_read_where_and_when_the_configuration_says(factbook_dir: Path, tmp_path: Path):
    copy_dataset(factbook_dir, tmp_path / "copy")
    store = Dataset(tmp_path / "copy").store
    store.edit("np", "capital", "Pokhara")
    store.delete("jp")
    url = to_memory(tmp_path / "copy" / "documents", "memory://documents-of-a-run")
    elsewhere = DataConfig(dir=str(factbook_dir), documents=url, at_edit=1, cache_dir=str(tmp_path / "cache"))
    dataset = Dataset.of(elsewhere)
    assert dataset.store.fetch(["np"])[0].fields["capital"] == "Pokhara" and "jp" in dataset.store
    assert dataset.store.copies is not None
    dataset.store.copies.wait()
    assert len(list((tmp_path / "cache").rglob("*.tar"))) == 1
    assert dataset.questions("train").ids == Dataset(factbook_dir).questions("train").ids
    assert "jp" not in Dataset.of(DataConfig(dir=str(factbook_dir), documents=url)).store
    own = Dataset.of(elsewhere, directory=tmp_path / "copy").store  # a copy has its own documents, as they are now
    assert own.folder.local == tmp_path / "copy" / "documents" and own.num_edits == 2
    for one in (dataset.store, own):
        one.close()
    tiny = Dataset.of(DataConfig(dir=str(factbook_dir), cache_dir=str(tmp_path / "tiny"), cache_gib=1e-6)).store
    with pytest.warns(UserWarning, match=r"is full \(1073 bytes\)"):
        tiny.fetch(["np"])
        assert tiny.copies is not None
        tiny.copies.wait()
    tiny.close()


@pytest.mark.parametrize(
    ("field", "value"), [("at_edit", -1), ("cache_gib", 0.0), ("cache_gib", math.inf), ("cache_gib", math.nan)]
)
def test_what_cannot_be_is_refused(field: str, value: float):
    with pytest.raises(ValueError, match=f"data.{field} is {value}"):
        DataConfig(**{field: value})  # type: ignore[arg-type]
