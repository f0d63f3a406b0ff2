"""Rows that the samples of a micro-batch share: sliced with it, found as a group, and exact under any cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeline import Block, BlockProgram, Pipeline, Plan, trace
from pipeline.lineage import require_sample_lineage
from pipeline.padding import pad_batch
from pipeline.verify import gradient_report, whole_batch_gradients
from tests.distributed import run_on_ranks

SAMPLES, K, MICROBATCHES, U, D = 8, 2, 4, 3, 5


class Gather(nn.Module):
    def forward(self, table_UD: Tensor, row_P: Tensor) -> Tensor:
        return table_UD[row_P % table_UD.shape[0]]


class GatherCentred(nn.Module):
    def forward(self, table_UD: Tensor, row_P: Tensor) -> Tensor:
        return (table_UD - table_UD.mean(0))[row_P % table_UD.shape[0]]


class Loss(nn.Module):
    def forward(self, read_PD: Tensor, weight_B: Tensor) -> Tensor:
        return read_PD.sin().unflatten(0, (weight_B.shape[0], -1)).sum((1, 2))[:, None] * weight_B[:, None]


def program(encoder: nn.Module | None = None, gather: nn.Module | None = None) -> BlockProgram:
    torch.manual_seed(0)
    return BlockProgram(
        [
            Block("encode", encoder or nn.Sequential(nn.Linear(D, D), nn.Tanh()), ("table",), ("code",)),
            Block("gather", gather or Gather(), ("code", "row"), ("read",)),
            Block("loss", Loss(), ("read", "weight"), ("losses",)),
        ],
        inputs=("sample_id", "table", "row", "weight"),
        outputs=("losses",),
        axes={"table": "microbatch", "code": "microbatch", "row": "pair", "read": "pair"},
    ).double()


def batch() -> dict[str, Tensor]:
    """Micro-batch m uses rows m*U to m*U + U - 1, but for the last of micro-batch 1, which is there for the shape."""
    g = torch.Generator().manual_seed(1)
    slot = torch.randint(U, (MICROBATCHES, SAMPLES * K // MICROBATCHES), generator=g)
    slot[1] %= U - 1
    return {
        "sample_id": torch.arange(SAMPLES),
        "table": torch.randn(MICROBATCHES * U, D, generator=g, dtype=torch.float64),
        "row": (slot + U * torch.arange(MICROBATCHES)[:, None]).flatten(),
        "weight": torch.rand(SAMPLES, generator=g, dtype=torch.float64),
    }


def test_a_micro_batch_is_given_its_own_rows() -> None:
    given = batch()
    rows = program().microbatch(given, 2, MICROBATCHES)
    assert torch.equal(rows["table"], given["table"][2 * U : 3 * U]) and rows["row"].shape == (4,)
    with pytest.raises(ValueError, match=r"'table' \(axis 'microbatch'\) has 11 rows.*do not divide into 4"):
        program().microbatch({**given, "table": given["table"][:-1]}, 0, MICROBATCHES)


def test_padding_samples_leaves_shared_rows_alone() -> None:
    given = {name: t[: 7 * (K if name == "row" else 1)] if name != "table" else t for name, t in batch().items()}
    padded = pad_batch(program(), given, multiple=4, weights=("weight",))
    assert padded["table"].shape[0] == MICROBATCHES * U and padded["row"].shape[0] == 16


@pytest.mark.parametrize("lineage_samples", [None, 4])
def test_a_gather_is_a_group_and_no_obstacle(lineage_samples: int | None) -> None:
    profile = trace(program(), batch(), num_microbatches=MICROBATCHES, lineage_samples=lineage_samples, repeats=1)
    assert [block.lineage for block in profile.blocks] == ["sample", "group", "sample"]
    assert profile.blocks[1].shared == ("code",)
    require_sample_lineage(profile)


@pytest.mark.parametrize("lineage_samples", [None, 4])
@pytest.mark.parametrize(
    ("mixing", "message"),
    [
        ({"gather": GatherCentred()}, r"'gather' mixes .* gather \(GatherCentred\): 'read' .* rows of 'code'"),
        (
            {"encoder": nn.BatchNorm1d(D, track_running_stats=False)},
            r"'encode' mixes .* encode \(BatchNorm1d\): 'code' .* rows of 'table' .*freeze_batch_norm",
        ),
    ],
    ids=["mean", "batch-norm"],
)
def test_rows_that_move_each_other_are_refused(
    mixing: dict[str, nn.Module], message: str, lineage_samples: int | None
) -> None:
    profile = trace(program(**mixing), batch(), num_microbatches=4, lineage_samples=lineage_samples, repeats=1)
    with pytest.raises(ValueError, match=message):
        require_sample_lineage(profile)


def report(cuts: list[int], schedule: str, num_microbatches: int) -> tuple[bool, str, list[str]]:
    model, given = program(), batch()
    right = whole_batch_gradients(program(), given, seed=0, step=1)
    plan = Plan.from_cuts(model, cuts, schedule=schedule, num_microbatches=num_microbatches)
    pipeline = Pipeline(model, plan, timeout_s=30)
    pipeline.step(given, seed=0, step=1)
    here = {n: p.grad for n, p in pipeline.parameters_here.items() if p.grad is not None}
    found = gradient_report(right.gradients, here, tolerance=1e-12)
    return bool(found), found.message, sorted(here)


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_gradients_are_those_of_the_whole_batch_on_any_coarser_cut(num_microbatches: int) -> None:
    right, message, names = report([], "gpipe", num_microbatches)
    assert right and len(names) == 2, message


@pytest.mark.parametrize("cut", [1, 2])
def test_gradients_are_those_of_the_whole_batch_over_two_ranks(cut: int) -> None:
    """Cut 1 sends the rows of each micro-batch, cut 2 what its pairs read."""
    found = run_on_ranks(report, 2, [cut], "1f1b", MICROBATCHES)
    assert all(right for right, _, _ in found), found
    assert [len(names) for _, _, names in found] == [2, 0]


def uneven_rows() -> str:
    pipeline = Pipeline(program(), Plan.from_cuts(program(), [1], num_microbatches=MICROBATCHES), timeout_s=30)
    try:
        pipeline.step({**batch(), "table": batch()["table"][:-1]}, seed=0, step=1)
    except ValueError as error:
        return str(error)
    return ""


def test_uneven_rows_are_refused_on_every_rank() -> None:
    assert all("'table' (axis 'microbatch') has 11 rows" in said for said in run_on_ranks(uneven_rows, 2))
