"""Learning rates over a run, worked by hand: 100 steps, warm-up of 10, decay over the last 40 % of a phase."""

import pytest

from rag_mm.config import TrainConfig
from rag_mm.optimizer import rates


def config(share: float) -> TrainConfig:
    peaks = {"learning_rate": 1.0, "retriever_learning_rate": 2.0, "joint_retriever_scale": 0.5}
    return TrainConfig(steps=100, retriever_share=share, warmup_steps=10, retriever_warmup_steps=10, **peaks)


@pytest.mark.parametrize(
    ("step", "reader", "retriever"),
    [
        (0, 0.0, 0.2),  # a tenth of the peak
        (9, 0.0, 2.0),
        (49, 0.0, 2.0),  # alone, and it goes on: no decay
        (50, 0.1, 1.0),  # the reader's first step; half the retriever's rate
        (79, 1.0, 1.0),  # 29 of 50 steps are over: 21 / 50 are more than 40 %
        (90, 0.5, 0.5),  # 40 of 50: (1 - .8) / .4
    ],
)
def test_the_retriever_first_and_then_both(step: int, reader: float, retriever: float) -> None:
    assert rates(config(0.5), step) == pytest.approx((reader, retriever))


@pytest.mark.parametrize(("step", "retriever"), [(0, 0.2), (60, 2.0), (80, 1.0), (99, 0.05)])
def test_a_retriever_alone_to_the_end_decays_there(step: int, retriever: float) -> None:
    """(1 - .8) / .4 at step 80; (1 - .99) / .4 at the last."""
    assert rates(config(1.0), step) == pytest.approx((0.0, retriever))
