"""Several stages a rank, blocks computed again on every stage, and measured events: real ranks against one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeline import Block, BlockProgram, Pipeline, Plan
from pipeline.order import rank_order
from pipeline.simulate import Event
from pipeline.verify import gradient_report, whole_batch_gradients
from tests.distributed import run_on_ranks
from tests.pipeline.fid_program import fid_batch, fid_program

# cuts, micro-batches
LOOPED = {
    2: [([1, 2, 4], 2), ([1, 2, 4], 3), ([1, 2, 3, 4, 5], 6)],
    3: [([1, 2, 3, 4, 5], 3), ([1, 2, 3, 4, 5], 6), ([1, 2, 3, 4, 5], 2)],
}


class Bias(nn.Module):
    """A learned bias by position, with no sample axis: one row a position of the target."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 6, dtype=torch.float64))

    def forward(self, x_BT: Tensor) -> Tensor:
        return self.weight[: x_BT.shape[1]].sin()


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, h_BT: Tensor, bias_T: Tensor) -> Tensor:
        return h_BT + torch.tanh(self.linear(h_BT) * bias_T)


class Loss(nn.Module):
    def forward(self, h_BT: Tensor, weight_B: Tensor) -> Tensor:
        return h_BT.square().sum(1, keepdim=True) * weight_B[:, None]


def biased_program() -> BlockProgram:
    """x -> three layers that read one bias -> loss; the bias may be computed again."""
    torch.manual_seed(0)
    return BlockProgram(
        [
            Block("bias", Bias(), ("x",), ("bias",), recomputable=True),
            Block("layer.0", Layer(5), ("x", "bias"), ("h",)),
            Block("layer.1", Layer(5), ("h", "bias"), ("h",)),
            Block("layer.2", Layer(5), ("h", "bias"), ("h",)),
            Block("loss", Loss(), ("h", "weight"), ("losses",)),
        ],
        inputs=("x", "weight"),
        outputs=("losses",),
        axes={"bias": None},
    ).double()


def biased_batch() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(8, 5, generator=g, dtype=torch.float64),
        "weight": torch.rand(8, generator=g, dtype=torch.float64),
    }


def _gradients(pipeline: Pipeline) -> dict[str, Tensor]:
    return {n: p.grad for n, p in pipeline.parameters_here.items() if p.grad is not None}


class TwoTowers(nn.Module):
    """(h, y) -> h: what joins the embedding of another input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, h_BT: Tensor, y_BT: Tensor) -> Tensor:
        return torch.tanh(self.linear(h_BT)) * y_BT


def joined_program() -> BlockProgram:
    """x -> layer; ids -> table, which needs nothing of x; then both are joined."""
    torch.manual_seed(0)
    return BlockProgram(
        [
            Block("first", nn.Linear(5, 5), ("x",), ("h",)),
            Block("second", nn.Linear(5, 5), ("h",), ("h",)),
            Block("table", nn.Embedding(7, 5), ("ids",), ("y",)),
            Block("join", TwoTowers(), ("h", "y"), ("h",)),
            Block("loss", Loss(), ("h", "weight"), ("losses",)),
        ],
        inputs=("x", "ids", "weight"),
        outputs=("losses",),
    ).double()


def joined_batch() -> dict[str, Tensor]:
    return {**biased_batch(), "ids": torch.arange(8) % 7}


def _looped(num_ranks: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for cuts, count in LOOPED[num_ranks]:
        program = fid_program()
        plan = Plan.from_cuts(program, cuts, schedule="interleaved", num_microbatches=count, num_ranks=num_ranks)
        pipeline = Pipeline(program, plan, timeout_s=30)
        pipeline.release_other_stages()
        for shapes in ({}, {"length": 7}, {}):
            for parameter in pipeline.parameters_here.values():
                parameter.grad = None
            batch = fid_batch(**shapes)  # type: ignore[arg-type]
            result = pipeline.step(batch, seed=3, step=5)
        pipeline.check_ties()
        everywhere = result.outputs_everywhere()
        assert (result.outputs is not None) == pipeline.has_last_stage
        found[f"{cuts} {count}"] = (_gradients(pipeline), everywhere, batch["scores"].grad, sorted(pipeline.owned))
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_interleaved_gradients_equal_one_device(num_ranks: int) -> None:
    ranks = run_on_ranks(_looped, num_ranks, num_ranks)
    right = whole_batch_gradients(fid_program(), fid_batch(), seed=3, step=5)
    for layout in ranks[0]:
        owned: list[str] = []
        for i, rank in enumerate(ranks):
            grads, outputs, leaf, owns = rank[layout]
            report = gradient_report(right.gradients, grads, tolerance=1e-10)
            assert report and report.num_compared, f"{layout}: {report.message}"
            owned += owns
            torch.testing.assert_close(outputs["losses"], right.outputs["losses"])
            assert (leaf is not None) == (i == num_ranks - 1)
        assert sorted(owned) == sorted(right.gradients), "each parameter counts once in the norm"


def _split(cuts: list[int], num_microbatches: int, num_ranks: int, check: bool) -> dict[str, Tensor] | str:
    program = joined_program()
    plan = Plan.from_cuts(program, cuts, schedule="zero_bubble", num_microbatches=num_microbatches, num_ranks=num_ranks)
    pipeline = Pipeline(program, plan, timeout_s=30)
    with pytest.MonkeyPatch.context() as patch:
        if not check:
            patch.setattr("pipeline.shaped_runtime._check_split_backward", lambda *_, **__: None)
        try:
            for _ in range(2):
                for parameter in pipeline.parameters_here.values():
                    parameter.grad = None
                pipeline.step(joined_batch(), seed=0, step=0)
        except ValueError as error:
            return str(error)
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in pipeline.parameters_here.items()}


def _failures(ranks: list[dict[str, Tensor]]) -> set[str]:
    right = whole_batch_gradients(joined_program(), joined_batch(), seed=0, step=0)
    reports = [gradient_report(right.gradients, grads, tolerance=1e-10) for grads in ranks]
    assert {name for grads in ranks for name in grads} == set(right.gradients)
    return {failure.name for report in reports for failure in report.failures}


@pytest.mark.parametrize(("cuts", "count", "ranks"), [([1, 2, 4], 4, 2), ([2], 4, 2), ([1, 2], 8, 3), ([1, 4], 2, 3)])
def test_zero_bubble_gradients_equal_one_device(cuts: list[int], count: int, ranks: int) -> None:
    assert not _failures(run_on_ranks(_split, ranks, cuts, count, ranks, True))


def test_a_split_backward_that_forgets_parameters_is_refused() -> None:
    forgotten = [1, 3, 4]  # stage 1 sends on the table's rows, for which it received nothing
    for message in run_on_ranks(_split, 2, forgotten, 4, 2, True):
        assert "stage 1: the gradient of parameter '1.weight'" in message and "interleaved" in message
    assert _failures(run_on_ranks(_split, 2, forgotten, 4, 2, False)) == {"table.weight"}


def _tied_or_scored(cuts: list[int]) -> str:
    program = fid_program()
    plan = Plan.from_cuts(program, cuts, schedule="zero_bubble", num_microbatches=3)
    with pytest.raises(ValueError) as error:
        Pipeline(program, plan, timeout_s=30).step(fid_batch(), seed=0, step=0)
    return str(error.value)


def test_a_split_backward_that_loses_gradients_of_inputs_or_fails_is_refused() -> None:
    for message in run_on_ranks(_tied_or_scored, 2, [5]):
        assert "stage 1: the gradient of batch input 'scores' would be lost" in message
    for message in run_on_ranks(_tied_or_scored, 3, [1, 5]):
        assert "stage 1: " in message


def _recomputed() -> dict[str, object]:
    found = {}
    for recomputed in ((), ("bias",)):
        program = biased_program()
        plan = Plan.from_cuts(program, [2, 3], num_microbatches=4, recomputed=recomputed)
        pipeline = Pipeline(program, plan, timeout_s=30)
        pipeline.release_other_stages()
        pipeline.step(biased_batch(), seed=0, step=0)
        pipeline.check_ties()
        found[recomputed] = (_gradients(pipeline), pipeline.inputs_here)
    return found


def test_a_block_computed_again_on_every_stage_has_the_gradient_of_one() -> None:
    ranks = run_on_ranks(_recomputed, 3)
    right = whole_batch_gradients(biased_program(), biased_batch(), seed=0, step=0)
    for recomputed in ((), ("bias",)):
        for i, rank in enumerate(ranks):
            grads, inputs = rank[recomputed]
            report = gradient_report(right.gradients, grads, tolerance=1e-10)
            assert report, report.message
            holds = i == 0 or (bool(recomputed) and i < 3)
            assert ("bias.weight" in grads) == holds
            assert ("x" in inputs) == holds


def test_what_is_computed_again_is_not_carried() -> None:
    program = biased_program()
    assert program.carry(2) == ("bias", "h")
    assert program.carry(2, recomputed={"bias"}) == ("h",)
    assert [b.name for b in program.rerun(2, 4, recomputed={"bias"})] == ["bias"]
    assert program.rerun(4, 5, recomputed={"bias"}) == ()  # the loss reads no bias
    assert program.inputs_of(2, 3, recomputed={"bias"}) == ("x",)
    batch = biased_batch()
    whole = program.run(batch)
    first = program.run(batch, 0, 2, recomputed={"bias"})
    assert set(first) == {"h"}
    second = program.run({**batch, **first}, 2, 5, recomputed={"bias"})
    assert torch.equal(second["losses"], whole["losses"])


def test_only_what_reads_batch_inputs_may_be_computed_again() -> None:
    with pytest.raises(ValueError, match="recomputable but reads 'h'"):
        BlockProgram(
            [
                Block("first", nn.Linear(2, 2), ("x",), ("h",)),
                Block("again", nn.Linear(2, 2), ("h",), ("losses",), recomputable=True),
            ],
            inputs=("x",),
            outputs=("losses",),
        )
    with pytest.raises(ValueError, match=r"'h' may not be written by 'second' as well"):
        BlockProgram(
            [
                Block("again", nn.Linear(2, 2), ("x",), ("h",), recomputable=True),
                Block("second", nn.Linear(2, 2), ("h",), ("h",)),
            ],
            inputs=("x",),
            outputs=("h",),
        )
    with pytest.raises(ValueError, match="not recomputable in the model"):
        Plan.from_cuts(biased_program(), [2], schedule="gpipe", recomputed=("layer.0",)).validate(biased_program())
    with pytest.raises(ValueError, match="did you mean 'bias'"):
        Plan.from_cuts(biased_program(), [2], schedule="gpipe", recomputed=("bia",)).validate(biased_program())


@pytest.mark.parametrize(
    ("stages", "ranks", "count", "message"),
    [
        (4, 3, 3, "4 stages do not divide over 3 ranks"),
        (4, 2, 5, "needs a multiple of 2"),
        (2, 3, 3, "2 stages need 1 to 2"),
    ],
)
def test_interleaved_mistakes(stages: int, ranks: int, count: int, message: str) -> None:
    program = fid_program()
    with pytest.raises(ValueError, match=message):
        Plan.from_cuts(program, list(range(1, stages)), schedule="interleaved", num_microbatches=count, num_ranks=ranks)


def test_other_schedules_run_one_stage_a_rank() -> None:
    with pytest.raises(ValueError, match="need the schedule interleaved"):
        Plan.from_cuts(fid_program(), [1, 2, 3], num_microbatches=2, num_ranks=2)


def _events() -> list[Event]:
    program = fid_program()
    pipeline = Pipeline(program, Plan.from_cuts(program, [3], num_microbatches=3), timeout_s=30, record=True)
    for step in range(2):  # of the last step only
        pipeline.step(fid_batch(), seed=0, step=step)
    return pipeline.events()


def test_events_are_those_of_the_schedule() -> None:
    first, second = run_on_ranks(_events, 2)
    assert first == second
    for stage in range(2):
        found = [(e.kind, e.stage, e.microbatch) for e in first if e.stage == stage]
        right = rank_order(stage, num_ranks=2, num_stages=2, num_microbatches=3, schedule="1f1b")
        assert found == [(a.kind, a.stage, a.microbatch) for a in right]
    for event in first:
        assert 0 <= event.start_s < event.end_s
    begin = {(e.kind, e.stage, e.microbatch): e for e in first}
    for i in range(3):
        assert begin["forward", 0, i].start_s < begin["forward", 1, i].end_s
        assert begin["backward", 1, i].start_s < begin["backward", 0, i].end_s


def test_nothing_is_recorded_unless_asked_for() -> None:
    program = fid_program()
    with pytest.raises(ValueError, match="record=True"):
        Pipeline(program, Plan.from_cuts(program, [])).events()
