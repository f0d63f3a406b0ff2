"""Which documents join a batch and which of them are right, over a memory made for it and over the small factbook."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data.document import Document
from data.image_formats import Unread
from data.samples import Pair, Sample
from rag_mm.config import Config
from rag_mm.contrast import Contrast, contents
from rag_mm.mesh import Mesh
from rag_mm.objectives import ObjectivesConfig
from tests.distributed import run_on_ranks
from tests.rag_mm.joint_setup import build, config

MINED = ObjectivesConfig(pdist=0.0, contrastive_mined_negatives=2, contrastive_mined_depth=3)


def document(name: str, title: str, image: bytes | None = None, *, capital: str = "") -> Document:
    return Document(name, title, {"capital": capital} if capital else {}, image)


# b is a copy of a under another id; c differs in its picture, d in its title; facts are not what is retrieved by.
MEMORY = {
    d.id: d
    for d in (
        document("a", "A", b"1", capital="X"), document("b", "A", b"1", capital="Y"), document("c", "A", b"2"),
        document("d", "D", b"1"), document("e", "E"), document("f", "F"), document("g", ""), document("h", ""),
    )
}  # fmt: skip
ALL = list(MEMORY.values())


class Found:
    """A memory whose index finds documents in one order, and counts what is read."""

    def __init__(self, order: str) -> None:
        self.store, self.order, self.read = MEMORY, list(order), list[str]()

    def search(self, query_BE: torch.Tensor, *, k: int) -> tuple[list[list[str]], torch.Tensor]:
        assert k <= len(self.order)
        return [self.order[:k]] * query_BE.shape[0], torch.zeros(query_BE.shape[0], k)

    def fetch(self, ids: list[str]) -> list[Document]:
        self.read += ids
        return [MEMORY[name] for name in ids]


def contrast(objectives: ObjectivesConfig, *, mesh: Mesh | None = None) -> tuple[Contrast, Found]:
    """Over a memory that is found in the order of its ids, on one process or a rank of ``mesh``."""
    memory: Any = Found("abcdefgh")
    mesh = mesh or Mesh(num_stages=1, num_replicas=1)
    towers: Any = SimpleNamespace(share=mesh.rows)
    return Contrast(replace(Config(), objectives=objectives), memory, towers=towers, mesh=mesh), memory


def joined(objectives: ObjectivesConfig, gold: list[list[str]], hard: list[list[str]], *, step: int = 0) -> set[str]:
    names = [f"question {q}" for q in range(len(gold))]
    return contrast(objectives)[0].documents(step, names, gold, hard, torch.zeros(len(gold), 2))


def test_several_right_and_misleading_documents_join() -> None:
    gold, hard = [["a", "b", "c"], ["d"], []], [["e", "f"], [], []]
    steps = [joined(ObjectivesConfig(), gold, hard, step=step) for step in range(20)]
    assert all(len(ids & set("abc")) == len(ids & set("ef")) == 1 and "d" in ids for ids in steps)
    assert set.union(*steps) == set("abcdef")  # drawn anew in each step
    more = ObjectivesConfig(contrastive_positives=2, contrastive_hard_negatives=5)
    assert all(len(joined(more, gold, hard, step=step) & set("abc")) == 2 for step in range(5))
    assert joined(more, gold, hard) > set("def")
    assert not joined(replace(more, contrastive_hard_negatives=0), gold, hard) & set("ef")


def test_documents_of_the_same_contents_are_right_whether_listed_or_not() -> None:
    made, memory = contrast(ObjectivesConfig())
    unique = list("bcdgh")
    found = made.positive([["a"], ["d"], ["g"], []], unique, [MEMORY[name] for name in unique])
    # b is a's copy although a itself is not in the batch; empty documents equal nothing
    assert [[n for n, yes in zip(unique, row, strict=True) if yes] for row in found.tolist()] == [
        ["b"],
        ["d"],
        ["g"],
        [],
    ]
    assert sorted(memory.read) == ["a", "d", "g"]
    made.positive([["a"]], unique, [MEMORY[name] for name in unique])
    assert sorted(memory.read) == ["a", "d", "g"]  # once a run
    assert len({contents(d) for d in MEMORY.values()}) == len(MEMORY) - 1


def of_rank(step: int) -> dict[str, Any]:
    """What one of several ranks finds, which has the pictures of its own documents only."""
    mesh = Mesh(num_stages=1, num_replicas=3)
    made, memory = contrast(MINED, mesh=mesh)
    gold: list[list[str]] = [["a"], ["c", "d"], ["g"], []]
    documents = [d if i % 3 == mesh.rank or not d.image else replace(d, image=Unread()) for i, d in enumerate(ALL)]
    mined = made.mined(step, ["q", "r", "s", "t"], gold, torch.zeros(4, 2))
    positive = made.positive(gold, list(MEMORY), documents)
    return {"mined": mined, "positive": positive.tolist(), "read": memory.read}


def test_ranks_share_the_reading_and_agree_with_one_that_reads_all() -> None:
    gold: list[list[str]] = [["a"], ["c", "d"], ["g"], []]
    for step in range(3):
        alone, memory = contrast(MINED)
        mined = alone.mined(step, ["q", "r", "s", "t"], gold, torch.zeros(4, 2))
        positive = alone.positive(gold, list(MEMORY), ALL).tolist()
        found = run_on_ranks(of_rank, 3, step)
        assert all(one["mined"] == mined and one["positive"] == positive for one in found)
        assert positive[0] == [name in "ab" for name in MEMORY]
        assert sorted(name for one in found for name in one["read"]) == sorted(memory.read)  # each by one of them
        assert all(one["read"] for one in found)
        with pytest.raises(AssertionError, match="where it was not read"):
            contents(replace(ALL[0], image=Unread()))


def test_what_is_mined_is_the_best_that_is_wrong() -> None:
    """The index finds a, b, c, d, ..; a and its copy b are right for the first query, and nothing is for the last."""
    made, _ = contrast(MINED)
    gold: list[list[str]] = [["a"], ["c", "d"], []]
    drawn = [made.mined(step, ["q", "r", "s"], gold, torch.zeros(3, 2)) for step in range(30)]
    assert all(len(ids) == len(set(ids)) == 2 for first, second, _ in drawn for ids in (first, second))
    assert all(not third for *_, third in drawn)
    # of the three best that are not listed (b, c, d) b falls out: c and d are left
    assert all(set(first) == set("cd") for first, _, _ in drawn)
    assert {name for _, second, _ in drawn for name in second} == set("abe")
    assert made.mined(7, ["q", "r", "s"], gold, torch.zeros(3, 2)) == drawn[7]  # a pure function of the step
    apart = [made.mined(step, ["x", "r", "s"], [["f"], [], []], torch.zeros(3, 2))[0] for step in range(30)]
    assert {frozenset(ids) for ids in apart} == {frozenset(p) for p in ("ab", "ac", "bc")}


def test_what_a_query_must_not_find_is_not_mined_for_it() -> None:
    made, _ = contrast(MINED)
    gold: list[list[str]] = [["f"], ["g"]]
    barred = [made.mined(step, ["q", "r"], gold, torch.zeros(2, 2), [("a", "c"), ()]) for step in range(30)]
    assert {name for first, _ in barred for name in first} == set("bde")
    assert {name for _, second in barred for name in second} == set("abc")


def test_there_may_be_fewer_wrong_documents_than_asked_for() -> None:
    made, _ = contrast(replace(MINED, contrastive_mined_negatives=8, contrastive_mined_depth=8))
    (found,) = made.mined(0, ["q"], [["a", "c", "d", "e"]], torch.zeros(1, 2))
    assert sorted(found) == ["f", "g", "h"]
    with pytest.raises(ValueError, match="contrastive_mined_depth is 3; it must be at least 4"):
        replace(MINED, contrastive_mined_negatives=4)


def test_mined_documents_are_in_the_batch_and_negatives_of_their_query(factbook_dir: Path, tmp_path: Path) -> None:
    settings = config(factbook_dir, objectives=MINED, retriever_share=0.5)
    joint, _ = build(settings, tmp_path)
    joint.memory.refresh(joint.towers, step=0, probe_BE=None, k=3, named=set())
    prepared, chosen = joint.prepare(0), list[list[str]]()
    assert not prepared.reader and joint.streams.searches(0)  # the retriever alone
    mine = joint.contrast.mined

    def watched(*args: Any) -> list[list[str]]:
        chosen.extend(mine(*args))
        return chosen

    joint.contrast.mined = watched  # type: ignore[method-assign]
    again = joint.prepare(0)
    assert torch.equal(again.positive, prepared.positive)
    plain = build(replace(settings, objectives=ObjectivesConfig(pdist=0.0)), tmp_path)[0].prepare(0)
    assert again.positive.shape[1] > plain.positive.shape[1]
    texts = [tuple(row.tolist()) for row in again.document["trigram"]]
    for q, ids in enumerate(chosen):
        assert bool(again.positive[q].any()) == (len(ids) == 2)
        for found in joint.memory.fetch(ids):
            trigram = joint.encoder.features([found.search_text], torch.ones(1, 3, 24, 24), torch.zeros(1))["trigram"]
            rows = [u for u, row in enumerate(texts) if row[: trigram.shape[1]] == tuple(trigram[0].tolist())]
            assert rows and not all(bool(again.positive[q, u]) for u in rows)


def without_gold(step: int, samples: list[Sample], pairs: list[Pair]) -> tuple[list[Sample], list[Pair]]:
    return [replace(s, gold=(), hard_negatives=()) for s in samples], pairs


@pytest.mark.parametrize("objective", ["pdist", "emdr2", "emdr2_token", "adist", "loop"])
def test_training_from_answers_alone_looks_at_no_label(objective: str, factbook_dir: Path, tmp_path: Path) -> None:
    """The same batch and the same gradients if questions name no documents; and the retriever learns from answers."""
    weights = {"pdist": 0.0, "contrastive_on": "pairs", objective: 1.0}
    settings = config(factbook_dir, objectives=ObjectivesConfig(**weights), pairs="unasked")
    found = []
    for blind in (False, True):
        joint, reader = build(settings, tmp_path / str(blind))
        if blind:
            samples = joint.samples
            joint.samples = lambda step, samples=samples: without_gold(step, *samples(step))  # type: ignore
        joint.memory.refresh(joint.towers, step=0, probe_BE=None, k=3, named=set())
        prepared = joint.prepare(1)
        found.append((prepared, *joint.reference(prepared, reader), joint.hit_at_k(prepared)))
    (seen, loss, gradients, hit), (unseen, blind_loss, blind_gradients, no_hit) = found
    assert seen.ids == unseen.ids and torch.equal(seen.positive, unseen.positive) and loss == blind_loss
    assert all(torch.equal(gradients[name], blind_gradients[name]) for name in gradients)
    assert hit is not None and no_hit in (None, 0.0)
    off = replace(settings, objectives=replace(settings.objectives, contrastive=0.0, generation_trains="reader"))
    joint, reader = build(off, tmp_path / "off")
    joint.memory.refresh(joint.towers, step=0, probe_BE=None, k=3, named=set())
    answers_only = joint.reference(joint.prepare(1), reader)[1]
    moved = [n for n, g in answers_only.items() if n.startswith("retriever.") and g.abs().max() > 0]
    assert "retriever.text.gate" in moved and "retriever.log_scale" not in moved


def test_the_index_is_kept_for_steps_that_search() -> None:
    """`IndexUpkeep.before_step` over a run: who moves, who searches, when it is made anew."""
    from rag_mm.index_upkeep import IndexUpkeep
    from rag_mm.streams import Streams

    def refreshed(objectives: ObjectivesConfig, **train: Any) -> list[int]:
        settings = config(Path("data"), objectives=objectives, steps=20, retriever_share=0.5, **train)
        settings = replace(settings, index=replace(settings.index, refresh_every_n_steps=4))
        made: list[int] = []
        memory = SimpleNamespace(version=None, holds=lambda towers: False)

        def refresh(towers: Any, *, step: int, **_: Any) -> None:
            made.append(step)
            memory.version = step

        memory.refresh = refresh
        streams = Streams(settings, fingerprint="f", num_questions=30, num_pairs=30)
        joint: Any = SimpleNamespace(streams=streams, probe=lambda step: None)
        mesh = SimpleNamespace(is_first=False)
        upkeep = IndexUpkeep(settings, memory=memory, towers=None, joint=joint, mesh=mesh, saver=None, say=print)  # type: ignore
        for step in range(20):
            if streams.searches(step):
                upkeep.before_step(step)
        return made

    plain = ObjectivesConfig()
    assert refreshed(plain) == [10, 14, 18]
    assert refreshed(plain, joint_retriever_scale=0.0) == [10]
    assert refreshed(plain, retriever_frozen_last=0.5) == [10, 14, 15]
    assert refreshed(plain, retriever_frozen_first=0.5) == [10, 18]
    assert refreshed(MINED) == [0, 2, 6, 10, 14, 18]
    assert refreshed(MINED, joint_retriever_scale=0.0) == [0, 2, 6, 10]
