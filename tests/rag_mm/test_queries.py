"""What workers prepare is what the step would have prepared itself, bit for bit."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from data.dataset import Dataset
from data.shards import write_index
from rag_mm.step import JointStep
from retriever.config import RetrieverConfig
from retriever.features import Featurizer
from tests import distributed
from tests.rag_mm.joint_setup import build, config, prepare
from tests.retriever.public_models import bert_folder

assert distributed  # its fork server has torch already, which workers then need not import


def make(directory: Path, out: Path, *, workers: int = 0, tail: str = "wrap") -> JointStep:
    settings = config(directory, retriever_share=0.5, steps=6)
    data = replace(settings.data, workers=workers, tail=tail)
    joint, _ = build(replace(settings, data=data), out)
    joint.samples = joint._queries_of.samples  # type: ignore[method-assign]  # without the bad ones
    return joint


def test_a_worker_prepares_the_same_steps(factbook_dir: Path, tmp_path: Path):
    joint = make(factbook_dir, tmp_path, workers=1)
    inline = [joint._taken(step) for step in range(1, 6)]
    with joint.reading_ahead(start=1):
        ahead = [joint._take(step) for step in range(1, 6)]
    for one, other in zip(inline, ahead, strict=True):
        assert one.samples == other.samples and one.pairs == other.pairs
        assert one.features.keys() == other.features.keys()
        assert all(torch.equal(one.features[name], other.features[name]) for name in one.features)
        assert (one.renaming is None) == (other.renaming is None)
        if one.renaming is not None and other.renaming is not None:
            assert all(
                one.renaming.value(f, v) == other.renaming.value(f, v) for f, vs in joint.values.items() for v in vs
            )
    assert joint._ahead is None and [batch.renaming is None for batch in ahead] == [True, True, False, False, False]


def test_what_a_worker_prepares_is_pinned_when_torch_asks(
    factbook_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As torch's loader does where there is a GPU; whether a tensor could be pinned is not asked here."""
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: pinned.append(tensor) or tensor)
    batch = make(factbook_dir, tmp_path)._taken(1)
    again = pin_memory(batch)
    assert {id(tensor) for tensor in pinned} == {id(tensor) for tensor in batch.features.values()}
    assert again.features == batch.features and again.samples == batch.samples


def test_a_step_from_a_worker_has_the_same_batch_as_one_without(factbook_dir: Path, tmp_path: Path):
    plain = make(factbook_dir, tmp_path / "a")
    expected = prepare(plain, step=4)
    joint = make(factbook_dir, tmp_path / "b", workers=1)
    joint.memory.refresh(joint.towers, step=0, probe_BE=None, k=3, named=set())
    with joint.reading_ahead(start=4):
        found = joint.prepare(4)
    assert found.ids == expected.ids and joint.data_digest(found) == plain.data_digest(expected)
    assert all(torch.equal(found.reader[name], expected.reader[name]) for name in expected.reader)


def test_bad_samples_that_a_worker_meets_are_counted_here(factbook_dir: Path, tmp_path: Path):
    folder = tmp_path / "data"
    shutil.copytree(factbook_dir, folder)
    tar = folder / "questions" / "shard-000000.tar"
    contents = bytearray(tar.read_bytes())
    place = contents.index(b"\x89PNG")
    contents[place + 8 : place + 30] = bytes(22)
    tar.write_bytes(contents)
    write_index(tar)
    joint = make(folder, tmp_path / "run", workers=1)
    joint.questions.bad.start_epoch()  # of what was met while the step was made
    with joint.reading_ahead(start=0):
        seen = [sample.id for step in range(6) for sample in joint._take(step).samples]
    assert joint.questions.bad.num_read == len(set(seen))
    bad = {sample.id for sample in joint.questions if not sample.weight}
    assert len(bad) == 1 and joint.questions.bad.num_bad == len(bad)


def test_texts_that_a_worker_cuts_off_for_the_retriever_are_counted_here(factbook_dir: Path, tmp_path: Path):
    folder = bert_folder(tmp_path / "bert")
    small = RetrieverConfig(k=3, text="transformers", text_model=folder, text_max_tokens=5)
    counts = []
    for workers in (0, 1):
        settings = config(factbook_dir, retriever=small, retriever_share=0.5, steps=6)
        settings = replace(settings, data=replace(settings.data, workers=workers))
        joint, _ = build(settings, tmp_path / str(workers))
        with joint.reading_ahead(start=0):
            batches = [joint._take(step) for step in range(3)]
        counts.append(joint.truncated)
        assert joint.truncated == sum(batch.truncated for batch in batches)
    limited = Featurizer(replace(small, text_max_tokens=64))
    texts = [item.question for batch in batches for item in batch.samples]
    texts += [pair.text for batch in batches for pair in batch.pairs]
    ids = limited(texts, torch.ones(len(texts), 3, 24, 24), torch.zeros(len(texts)), side="query")["attention_mask"]
    assert counts == [int((ids.sum(1) > 5).sum())] * 2 and 0 < counts[0] < len(texts)


@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_what_fills_up_an_epoch_counts_nowhere(factbook_dir: Path, tmp_path: Path, tail: str):
    joint = make(factbook_dir, tmp_path, tail=tail)
    num, size = len(Dataset(factbook_dir).questions("train")), 8
    assert num % size
    last = 3 + num // size  # the batch that holds the end of the epoch; the reader joins after 3 steps
    samples, _ = joint.samples(last)
    filler = [sample for sample in samples if not sample.weight]
    assert len(samples) == size and len(filler) == (size - num % size if tail == "pad" else 0)
    assert all(sample.gold == () for sample in filler)
    prepared = joint._assemble(
        last, joint._taken(last), joint._embedded(joint._taken(last).features), [["np", "jp", "br"]] * size, reads=True
    )
    for row, sample in enumerate(samples):
        if not sample.weight:
            assert prepared.contrastive_weight[row] == 0 and prepared.reader["sample_weight"][row] == 0
            assert prepared.reader["target_weight"][row].sum() == 0
    assert prepared.reader["target_weight"].sum() == pytest.approx(1.0)
