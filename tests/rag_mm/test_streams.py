from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.config import DataConfig
from data.order import epoch_order
from pipeline.keyed import seed_of
from rag_mm.config import Config, TrainConfig
from rag_mm.objectives import ObjectivesConfig
from rag_mm.optimizer import rates
from rag_mm.streams import Streams

NAMES = ("questions", "questions alone", "pairs")


def config(steps: int = 20, contrastive_on: str = "both", data: dict[str, Any] | None = None, **train: Any) -> Config:
    sizes = {"batch_size": 8, "retriever_batch_size": 4, "pair_batch_size": 6}
    return Config(
        data=DataConfig(**(data or {})),
        objectives=ObjectivesConfig(contrastive_on=contrastive_on),  # type: ignore[arg-type]
        train=TrainConfig(**{"steps": steps, **sizes, **train}),
    )


def streams(settings: Config, *, questions: int = 30, pairs: int = 25) -> Streams:
    return Streams(settings, fingerprint="f", num_questions=questions, num_pairs=pairs)


PHASES = st.builds(
    config,
    steps=st.integers(1, 30),
    retriever_share=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    joint_retriever_scale=st.sampled_from([0.0, 1.0]),
    retriever_frozen_first=st.sampled_from([0.0, 0.4]),
    retriever_frozen_last=st.sampled_from([0.0, 0.3, 0.6]),
    documents=st.sampled_from(["retrieved", "none"]),
    contrastive_on=st.sampled_from(["pairs", "questions", "both"]),
)


@given(settings=PHASES)
def test_the_number_of_a_batch_is_how_many_steps_took_one_before(settings: Config):
    flowing = streams(settings)
    for name in NAMES:
        taken = 0
        for step in range(settings.train.steps + 1):
            assert flowing.number(name, step) == taken  # the slow twin counts
            taken += flowing.flows(name, step)


@given(settings=PHASES, since=st.integers(0, 30), step=st.integers(0, 30))
def test_whether_the_retriever_has_moved_since(settings: Config, since: int, step: int):
    flowing = streams(settings)
    step = min(step, settings.train.steps)
    since = min(since, step)
    assert flowing.moved_retriever(since, step) == any(map(flowing.trains_retriever, range(since, step)))


@given(settings=PHASES)
def test_the_retriever_has_a_rate_where_it_trains(settings: Config):
    """But for closed book, where nothing reaches it, and the rate does not matter."""
    train, flowing = settings.train, streams(settings)
    for step in range(train.steps):
        rate = rates(train, step)[1]
        if train.documents != "none" or not flowing.reads(step):
            assert (rate > 0) == flowing.trains_retriever(step)
        first, last = train.retriever_moves
        assert not flowing.trains_retriever(step) or not flowing.reads(step) or first <= step < last


def test_the_retriever_warms_up_by_its_own_steps_and_is_frozen_in_its_shares():
    train = TrainConfig(steps=20, retriever_share=0.0, retriever_frozen_first=0.2, retriever_frozen_last=0.5,
                        warmup_steps=2, retriever_warmup_steps=4, retriever_learning_rate=8.0)  # fmt: skip
    assert [rates(train, step)[1] for step in range(11)] == [0, 0, 0, 0, 2, 4, 6, 8, 8, 8, 0]
    assert [rates(train, step)[0] / train.learning_rate for step in (0, 1, 2)] == [0.5, 1, 1]
    alone = replace(train, retriever_share=0.5)  # it starts with the run, and is not started anew
    assert [rates(alone, step)[1] for step in (0, 1, 3, 10, 11, 12)] == [2, 4, 8, 0, 0, 8]


def test_the_first_batches_are_those_of_the_full_permutation_of_each_stream():
    """What runs before windows existed trained on, and docs/results.md reports."""
    settings = config(steps=10, retriever_share=0.4)
    flowing = streams(settings)
    for name, step, size in (("questions", 4, 8), ("questions alone", 0, 4), ("pairs", 0, 6)):
        seed = seed_of(name, settings.train.seed)
        num = 25 if name == "pairs" else 30
        expected = epoch_order(num, fingerprint="f", seed=seed, epoch=0)[:size]
        slots = flowing.slots(name, step)
        assert slots is not None and slots.positions.tolist() == expected.tolist()
    assert flowing.slots("questions", 3) is None and flowing.slots("questions alone", 4) is None


@given(settings=PHASES, at=st.integers(0, 30), steps=st.integers(1, 40), share=st.sampled_from([0.0, 0.3, 0.9]))
def test_a_resumed_run_goes_on_from_its_cursors_also_with_other_phases(
    settings: Config, at: int, steps: int, share: float
):
    at = min(at, settings.train.steps)
    cursors = json.loads(json.dumps(streams(settings).cursors(at)))
    other = replace(settings, train=replace(settings.train, steps=max(steps, at + 1), retriever_share=share))
    resumed = streams(other)
    resumed.go_on(at, cursors)
    for name in NAMES:
        taken = cursors[name]["batches"]
        for step in range(at, other.train.steps):
            assert resumed.number(name, step) == taken
            taken += resumed.flows(name, step)
    same = streams(settings)
    same.go_on(at, cursors)
    for step in range(at, settings.train.steps):
        assert same.cursors(step) == streams(settings).cursors(step)


@pytest.mark.parametrize(
    "changed",
    [
        {"data": {"tail": "pad"}},
        {"batch_size": 4},
        {"seed": 1},
        {"data": {"shuffle_chunk": 2, "shuffle_window": 4}},
    ],
)
def test_cursors_of_other_settings_are_refused(changed: dict[str, Any]):
    cursors = streams(config()).cursors(3)
    with pytest.raises(ValueError, match="another stream"):
        streams(config(**changed)).go_on(3, cursors)
    with pytest.raises(ValueError, match="says nothing of the stream 'pairs'"):
        streams(config()).go_on(3, {name: c for name, c in cursors.items() if name != "pairs"})


def test_no_questions_to_train_on_is_said():
    with pytest.raises(ValueError, match="has no training questions"):
        streams(config(retriever_share=0.0), questions=0).slots("questions", 0)
