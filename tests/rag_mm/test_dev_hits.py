"""hit@k over a fixed sample of the dev split."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data.dataset import Dataset
from rag_mm.dev_hits import DevHits
from tests.distributed import run_on_ranks
from tests.rag_mm.joint_setup import build, config
from tests.rag_mm.refreshed_runs import settings, train


def measured(directory: Path, run_dir: Path, replicas: int = 1) -> tuple[float | None, float]:
    """What is measured, and what one question after another gives."""
    settings = config(directory, replicas=replicas, dev_questions=40)
    joint, _ = build(settings, run_dir)
    joint.memory.refresh(joint.towers, step=0, probe_BE=None, k=3, named=set())
    found = DevHits(settings, joint.dataset).measure(joint.memory, joint.towers)
    questions = joint.dataset.questions("dev")
    places = [i * len(questions) // 40 for i in range(40)]
    hits = []
    for sample in questions.read(places):
        image, has_image = joint.collator.images([sample.image])
        features = joint.encoder.features([sample.question], image, has_image, side="query")
        with torch.no_grad():
            ids, _ = joint.memory.search(joint.encoder(features), k=3)
        hits.append(bool(set(ids[0]) & set(sample.gold)))
    return found, sum(hits) / len(hits)


def test_it_is_the_share_of_questions_with_a_right_document(factbook_dir: Path, tmp_path: Path) -> None:
    found, right = measured(factbook_dir, tmp_path)
    assert found == right and 0 < right < 1
    assert run_on_ranks(measured, 2, factbook_dir, tmp_path, 2) == [(found, right)] * 2


def test_none_without_questions(factbook_dir: Path, tmp_path: Path) -> None:
    settings = config(factbook_dir, dev_questions=0)
    joint, _ = build(settings, tmp_path)
    assert DevHits(settings, Dataset(settings.data.dir)).measure(joint.memory, joint.towers) is None
    assert replace(settings.train, dev_questions=10**6)  # all there are


@pytest.mark.parametrize(
    ("index", "how", "measured_before"),
    [
        ({"refresh": "none", "refresh_every_n_steps": 2}, {}, [2, 4]),
        ({"refresh": "query_side", "refresh_every_n_steps": 1}, {}, [2, 3, 4, 5]),
        ({"refresh": "none", "refresh_every_n_steps": 0}, {}, [2]),
        ({"refresh": "none", "refresh_every_n_steps": 1}, {"joint_retriever_scale": 0.0}, [2]),
        ({"refresh": "none", "refresh_every_n_steps": 1}, {"retriever_frozen_last": 0.5}, [2, 3, 4]),
    ],
    ids=["none", "query_side", "never", "frozen", "frozen_last"],
)
def test_it_is_measured_though_the_index_stays(
    factbook_dir: Path, tmp_path: Path, index: dict[str, Any], how: dict[str, Any], measured_before: list[int]
) -> None:
    lines = train(settings(factbook_dir, tmp_path / "run", index=index, **how))["lines"]
    found = {line["step"] - 1: line["dev_hit_at_k"] for line in lines}
    assert [step for step, hit in found.items() if hit is not None] == measured_before
    assert {line["index_version"] for line in lines} == {None, 2}
    assert all(0 < found[step] < 1 for step in measured_before)


def test_a_resumed_run_measures_at_the_same_steps(factbook_dir: Path, tmp_path: Path) -> None:
    made = settings(factbook_dir, tmp_path / "run", index={"refresh": "none", "refresh_every_n_steps": 3})
    whole = train(made)["lines"]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-6")
    assert train(made)["lines"] == whole and whole[5]["dev_hit_at_k"] is not None
