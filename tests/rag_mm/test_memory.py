"""One batch is searched in one index version, the same on every rank; what is wrong with a version, every rank says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rag_mm.preparation import DRIFT_EVERY
from retriever.embed import embed_documents
from retriever.sharded import ShardedIndex
from tests.distributed import run_on_ranks
from tests.rag_mm.joint_setup import build, config, prepare


def test_an_index_that_is_taken_up_within_a_step_is_an_error(
    factbook_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    joint, _ = build(config(factbook_dir), tmp_path)
    prepared = prepare(joint)
    assert prepared.index_version == 0
    fetch = joint.memory.fetch

    def refreshed_between(ids: list[str], **how: Any):  # type: ignore[no-untyped-def]
        joint.memory.refresh(joint.towers, step=1, probe_BE=None, k=3, named=set())
        return fetch(ids, **how)

    monkeypatch.setattr(joint.memory, "fetch", refreshed_between)
    with pytest.raises(AssertionError, match="within a step"):
        joint.prepare(1)


def _mixed(directory: Path, run_dir: Path) -> str:
    joint, _ = build(config(directory, ranks=2), run_dir)
    prepare(joint)
    if not joint.mesh.is_first:
        joint.memory.version = 7
    try:
        joint.memory.search(torch.zeros(1, joint.encoder.dim), k=1)
    except AssertionError as error:
        return str(error)
    return ""


def test_ranks_at_two_versions_notice(factbook_dir: Path, tmp_path: Path):
    assert run_on_ranks(_mixed, 2, factbook_dir, tmp_path) == [
        "",
        "this rank is at index version 7, the first one at 0",
    ]


def _damaged(directory: Path, run_dir: Path) -> str:
    joint, _ = build(config(directory, ranks=2), run_dir)
    prepare(joint)
    if joint.mesh.is_first:
        (run_dir / "versions" / "0" / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="damaged") as error:
        joint.memory.load(0, staleness=None)
    return str(error.value)


def test_a_damaged_version_is_said_on_every_rank(factbook_dir: Path, tmp_path: Path):
    one, other = run_on_ranks(_damaged, 2, factbook_dir, tmp_path)
    assert one == other and "manifest.json is damaged" in one


def _sharded(directory: Path, run_dir: Path, sharded: bool) -> dict[str, Any]:
    joint, _ = build(config(directory, ranks=2), run_dir)
    joint.memory.sharded, joint.memory.batch_size = sharded, 8
    prepare(joint)
    query_BE = joint.probe(0)
    ids, score = joint.memory.search(query_BE, k=7)
    held = joint.memory._index
    joint.memory.load(0, staleness=None)
    again = joint.memory.search(query_BE, k=7)[0]
    count = len(held.part) if isinstance(held, ShardedIndex) else 0 if held is None else len(held)
    return {"ids": ids, "score": score, "again": again, "held": count, "all": len(joint.memory.store)}


def test_a_sharded_index_finds_the_same(factbook_dir: Path, tmp_path: Path):
    whole = run_on_ranks(_sharded, 2, factbook_dir, tmp_path / "whole", False)
    parts = run_on_ranks(_sharded, 2, factbook_dir, tmp_path / "parts", True)
    for one, other in zip(whole, parts, strict=True):
        assert one["ids"] == other["ids"] == other["again"] and torch.equal(one["score"], other["score"])
    assert [rank["held"] for rank in whole] == [whole[0]["all"], 0]
    assert sum(rank["held"] for rank in parts) == whole[0]["all"] and min(rank["held"] for rank in parts) > 0


def test_blocks_of_the_memory_are_the_batches_of_the_whole(factbook_dir: Path, tmp_path: Path):
    """What is embedded block by block, so that no rank holds all, has the bits of all at once."""
    joint, _ = build(config(factbook_dir), tmp_path)
    joint.memory.batch_size = 8
    store = joint.memory.store
    whole = embed_documents(joint.encoder, store, store.ids, image_size=24, batch_size=8)
    assert torch.equal(torch.cat(list(joint.memory._embedded(joint.towers))), whole)


def test_training_does_not_find_what_a_question_must_not_be_given(factbook_dir: Path, tmp_path: Path):
    joint, _ = build(config(factbook_dir), tmp_path)
    before = prepare(joint)
    whole, names = joint.samples, [tuple(ids[:1]) for ids in before.ids]

    def barred(step: int) -> Any:
        samples, pairs = whole(step)
        return [replace(s, forbidden=own) for s, own in zip(samples, names, strict=True)], pairs

    joint.samples = barred  # type: ignore[method-assign]
    after = joint.prepare(before.step)
    for old, new in zip(before.ids, after.ids, strict=True):
        assert len(new) == len(old) and old[0] not in new and new[: len(old) - 1] == old[1:]
    names = [tuple(joint.memory.store.ids)] * len(names)
    with pytest.raises(ValueError, match="0 are left to a query"):
        joint.prepare(before.step)


def moved(parameters: Any, *, by: float) -> None:
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in parameters:
            parameter += by * torch.randn(parameter.shape, generator=g)


def aged(directory: Path, run_dir: Path, ranks: int, sharded: bool) -> dict[str, Any]:
    """What is said of an index whose towers moved on, and what loops over questions and documents give."""
    joint, _ = build(config(directory, ranks=ranks), run_dir)
    joint.memory.sharded, joint.memory.keep = sharded, 2
    memory, encoder, k = joint.memory, joint.encoder, joint.config.retriever.k
    memory.refresh(joint.towers, step=0, probe_BE=joint.probe(0), k=k, named=set())
    assert memory.staleness is None  # nothing to compare with
    held = embed_documents(encoder, memory.store, memory.store.ids, image_size=24, batch_size=64)
    moved([p for name, p in encoder.named_parameters() if name.startswith(("text.", "image."))], by=0.05)
    assert DRIFT_EVERY > 1 and joint.prepare(1).drift is None
    prepared = joint.prepare(DRIFT_EVERY)
    row = {name: i for i, name in enumerate(memory.store.ids)}
    changes = []
    for query, names in zip(prepared.query_embedding, prepared.ids, strict=False):
        for name in names:
            now = embed_documents(encoder, memory.store, [name], image_size=24, batch_size=1)[0]
            changes.append(abs(float(query @ now) - float(query @ held[row[name]])))
    probe_BE = joint.probe(1)
    new = embed_documents(encoder, memory.store, memory.store.ids, image_size=24, batch_size=64)
    memory.refresh(joint.towers, step=1, probe_BE=probe_BE, k=k, named=set())
    missed = 0
    for query in probe_BE:
        before, after = ((table @ query).topk(k).indices.tolist() for table in (held, new))
        missed += sum(document not in before for document in after)
    return {
        "drift": (prepared.drift, sum(changes) / len(changes)), "asked": (len(changes), len(probe_BE)),
        "changed": (memory.staleness, missed / (k * len(probe_BE))),
    }  # fmt: skip


@pytest.mark.parametrize("ranks, sharded", [(1, False), (2, False), (2, True)])
def test_staleness_is_what_loops_over_questions_and_documents_give(
    factbook_dir: Path, tmp_path: Path, ranks: int, sharded: bool
):
    arguments = (factbook_dir, tmp_path, ranks, sharded)
    for found in [aged(*arguments)] if ranks == 1 else run_on_ranks(aged, ranks, *arguments):
        assert found["asked"] == (8 * 3, 8)
        assert found["drift"][0] == pytest.approx(found["drift"][1], rel=1e-4) and found["drift"][1] > 1e-3
        assert found["changed"][0] == pytest.approx(found["changed"][1]) and 0 < found["changed"][1] < 1


def test_staleness_of_an_index_of_the_same_weights_is_0(factbook_dir: Path, tmp_path: Path):
    joint, _ = build(config(factbook_dir), tmp_path)
    prepare(joint)
    joint.memory.refresh(joint.towers, step=1, probe_BE=joint.probe(1), k=3, named=set())
    drift = joint.prepare(DRIFT_EVERY).drift
    assert joint.memory.staleness == 0 and drift is not None and drift < 1e-5


def test_an_index_is_held_until_towers_move_and_never_if_it_was_tuned(factbook_dir: Path, tmp_path: Path):
    joint, _ = build(config(factbook_dir), tmp_path)
    memory, towers = joint.memory, joint.towers
    assert not memory.holds(towers)
    prepare(joint)
    assert memory.holds(towers)
    index = memory._index
    assert index is not None
    for changed in ({"factory": "IVF4,Flat"}, {"num_edits": 1}):
        index.manifest, kept = replace(index.manifest, **changed), index.manifest  # type: ignore[union-attr]
        assert not memory.holds(towers)
        index.manifest = kept  # type: ignore[union-attr]
    assert memory.holds(towers)
    moved([joint.encoder.text.vector], by=1e-3)
    assert not memory.holds(towers)
