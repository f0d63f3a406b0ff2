from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.cursor import Batches, Cursor, Tail
from data.mixture import Mixture
from data.order import Order


def batches(num: int, size: int, tail: Tail = "wrap", seed: int = 0) -> Batches:
    return Batches(Order(num, "f", seed, chunk=4, window=16), size, tail)


def seen(b: Batches, count: int) -> list[list[tuple[int, float]]]:
    slots = [b.at(n) for n in range(count)]
    return [list(zip(s.positions.tolist(), s.weights.tolist(), strict=True)) for s in slots]


@given(num=st.integers(1, 60), size=st.integers(1, 70), epochs=st.integers(1, 3), seed=st.integers())
def test_wrap_takes_every_sample_once_an_epoch_and_no_batch_is_short(num: int, size: int, epochs: int, seed: int):
    flat = [slot for batch in seen(batches(num, size, seed=seed), -(-num * epochs // size)) for slot in batch]
    for epoch in range(epochs):
        assert sorted(flat[epoch * num : (epoch + 1) * num]) == [(i, 1.0) for i in range(num)]


@given(num=st.integers(1, 60), size=st.integers(1, 70), seed=st.integers())
def test_pad_ends_each_epoch_with_a_batch_and_counts_every_sample_once(num: int, size: int, seed: int):
    b, per_epoch = batches(num, size, "pad", seed), -(-num // size)
    for epoch in range(3):
        rows = [slot for n in range(per_epoch) for slot in seen_at(b, epoch * per_epoch + n)]
        assert len(rows) == per_epoch * size
        assert sorted(i for i, weight in rows if weight) == list(range(num))
        assert [weight for _, weight in rows] == [1.0] * num + [0.0] * (per_epoch * size - num)


def seen_at(b: Batches, n: int) -> list[tuple[int, float]]:
    slots = b.at(n)
    assert len(slots.positions) == len(slots.weights) == b.batch_size
    return list(zip(slots.positions.tolist(), slots.weights.tolist(), strict=True))


@given(num=st.integers(5, 60), size=st.integers(1, 5), seed=st.integers())
def test_drop_leaves_out_the_rest_of_an_epoch_and_nothing_twice(num: int, size: int, seed: int):
    b, per_epoch = batches(num, size, "drop", seed), num // size
    for epoch in range(3):
        rows = [i for n in range(per_epoch) for i, _ in seen_at(b, epoch * per_epoch + n)]
        assert len(rows) == len(set(rows)) == per_epoch * size
        assert rows == b.source.stream(epoch * num, epoch * num + len(rows)).tolist()


def test_drop_leaves_out_others_in_the_next_epoch():
    b = batches(10, 4, "drop")
    left = [set(range(10)) - {i for n in (0, 1) for i, _ in seen_at(b, 2 * epoch + n)} for epoch in range(6)]
    assert len({frozenset(s) for s in left}) > 1


@given(
    num=st.integers(5, 60), size=st.integers(1, 5), tail=st.sampled_from(["wrap", "pad", "drop"]), n=st.integers(0, 50)
)
def test_a_cursor_goes_on_with_the_next_batch_and_survives_json(num: int, size: int, tail: Tail, n: int):
    b = batches(num, size, tail)
    cursor = Cursor.from_json(json.loads(json.dumps(b.consumed(n).to_json())))
    assert b.go_on(cursor) == n
    assert cursor.samples == sum(weight > 0 for batch in seen(b, n) for _, weight in batch)


@pytest.mark.parametrize(
    "other",
    [
        batches(21, 4), batches(20, 5), batches(20, 4, "pad"), batches(20, 4, seed=1),
        Batches(Order(20, "f", 0, chunk=2, window=16), 4), Batches(Order(20, "g", 0, chunk=4, window=16), 4),
    ],
)  # fmt: skip
def test_a_cursor_of_another_stream_is_refused(other: Batches):
    with pytest.raises(ValueError, match="another stream"):
        other.go_on(batches(20, 4).consumed(3))


def test_a_window_larger_than_the_data_is_no_other_stream():
    assert Batches(Order(20, "f", 0, chunk=2, window=64), 4).fingerprint == batches_whole().fingerprint


def batches_whole() -> Batches:
    return Batches(Order(20, "f", 0, chunk=4, window=32), 4)


@pytest.mark.parametrize("value", [{}, {"fingerprint": "x", "batches": "many", "samples": 0}, None])
def test_what_is_no_cursor_is_refused(value: Any):
    with pytest.raises(ValueError, match="not a cursor"):
        Cursor.from_json(value)


def test_a_cursor_that_does_not_add_up_is_refused():
    b = batches(20, 4)
    with pytest.raises(ValueError, match="13 samples in 3 batches"):
        b.go_on(Cursor(b.fingerprint, 3, 13))


def test_wrong_settings_are_named():
    mixed = Mixture((Order(9, "a", 0),), (Fraction(1),))
    for wrong, said in (
        (lambda: batches(9, 0), "batch_size is 0"),
        (lambda: batches(9, 2, "cut"), "allowed are wrap, pad and drop"),  # type: ignore[arg-type]
        (lambda: batches(9, 10, "drop"), "smaller than a batch of 10"),
        (lambda: Batches(mixed, 2, "pad"), "use wrap"),
        (lambda: batches(9, 2).at(-1), "n is -1"),
    ):
        with pytest.raises(ValueError, match=said):
            wrong()
