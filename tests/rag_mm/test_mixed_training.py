"""Training on a mixture of data sets: shares are exact, and workers read the same."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.dataset import Dataset
from data.mixed_view import MixedView
from rag_mm.step import JointStep
from tests import distributed
from tests.rag_mm.joint_setup import build, config

assert distributed  # its fork server has torch already, which workers then need not import


@pytest.fixture(scope="module")
def other_dir(factbook_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same questions as another data set."""
    folder = tmp_path_factory.mktemp("other") / "other"
    shutil.copytree(factbook_dir, folder)
    info = json.loads((folder / "dataset.json").read_text())
    (folder / "dataset.json").write_text(json.dumps({**info, "fingerprint": "of the copy"}))
    return folder


def make(directory: Path, out: Path, mixture: dict[str, float], *, workers: int = 0) -> JointStep:
    settings = config(directory, steps=12)
    joint, _ = build(replace(settings, data=replace(settings.data, mixture=mixture, workers=workers)), out)
    joint.samples = joint._queries_of.samples  # type: ignore[method-assign]  # without the bad ones
    return joint


def test_each_data_set_has_its_share_and_workers_read_the_same(factbook_dir: Path, other_dir: Path, tmp_path: Path):
    mixture = {str(factbook_dir): 0.75, str(other_dir): 0.25}
    joint = make(factbook_dir, tmp_path, mixture, workers=1)
    assert isinstance(joint.questions, MixedView)
    ids = Dataset(factbook_dir).questions("train").ids
    one = len(ids)
    assert len(joint.questions) == 2 * one and [s.id for s in joint.questions] == 2 * ids
    from_other = 0
    for step in range(12):
        slots = joint.streams.slots("questions", step)
        assert slots is not None
        from_other += int((slots.positions >= one).sum())
        assert from_other == 2 * (step + 1)  # a quarter of 8
        assert [s.id for s in joint.samples(step)[0]] == [joint.questions[i].id for i in slots.positions.tolist()]
    with joint.reading_ahead(start=0):
        for step in range(3):
            taken, inline = joint._take(step), joint._taken(step)
            assert taken.samples == inline.samples
            assert all(torch.equal(taken.features[name], inline.features[name]) for name in inline.features)
    assert joint.questions.bad.num_read > 0


def test_a_question_about_a_document_that_the_memory_lacks_is_refused(
    factbook_dir: Path, other_dir: Path, tmp_path: Path
):
    folder = tmp_path / "foreign"
    shutil.copytree(other_dir, folder)
    (folder / "asked.json").write_text('["xx"]')
    with pytest.raises(ValueError, match=r"data.mixture names .*foreign.*document 'xx'; the memory is that of"):
        make(factbook_dir, tmp_path / "run", {str(factbook_dir): 1, str(folder): 1})


@pytest.mark.parametrize(
    ("mixture", "tail", "said"),
    [({"a": 0.0}, "wrap", "data.mixture: the weight of 'a'"), ({"a": 1.0}, "pad", "end their epochs at different")],
)
def test_wrong_mixtures_are_named(factbook_dir: Path, mixture: dict[str, float], tail: str, said: str):
    data = config(factbook_dir).data
    with pytest.raises(ValueError, match=said):
        replace(data, mixture=mixture, tail=tail)
