"""Which checkpoints stay."""

from hypothesis import given
from hypothesis import strategies as st

from rag_mm.retention import Kept, retained


def test_good_ones_are_not_rotated_away_by_a_diverged_run():
    run = [Kept(10, True), Kept(20, True), *(Kept(step, False) for step in range(30, 100, 10))]
    assert retained(run, newest=2, every=0) == {10, 20, 90}


def test_every_m_and_the_best_stay():
    run = [Kept(step, True, score) for step, score in ((10, 0.2), (20, 0.9), (30, 0.9), (40, 0.1), (50, 0.3))]
    assert retained(run, newest=1, every=0) == {20, 50}  # the earliest of the best
    assert retained(run, newest=1, every=20) == {20, 40, 50}
    assert retained([Kept(10, False, 1.0), Kept(20, True, 0.1)], newest=1, every=10) == {20}


@given(
    st.lists(st.tuples(st.integers(1, 60), st.booleans(), st.none() | st.floats(-1, 1)), unique_by=lambda c: c[0]),
    st.integers(1, 4),
    st.integers(0, 12),
)
def test_promises(run: list[tuple[int, bool, float | None]], newest: int, every: int):
    checkpoints = [Kept(*c) for c in run]
    stay = retained(checkpoints, newest=newest, every=every)
    good = sorted(c.step for c in checkpoints if c.good)
    assert stay <= {c.step for c in checkpoints}
    assert set(good[-newest:]) <= stay  # never the last good one
    assert not checkpoints or max(c.step for c in checkpoints) in stay  # from which the run resumes
    assert {s for s in good if every and s % every == 0} <= stay
