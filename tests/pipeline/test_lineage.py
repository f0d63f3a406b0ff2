"""Mixing of samples is found, whatever form it takes, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import Block, BlockProgram, keyed, trace
from pipeline.conversion import (
    batch_norm_to_group_norm,
    batch_norm_to_layer_norm,
    freeze_batch_norm,
    synchronise_batch_norm,
)
from pipeline.lineage import require_sample_lineage
from pipeline.verify import gradient_report, whole_batch_gradients
from tests.pipeline.fid_program import fid_batch, fid_program

B, D = 6, 5


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class _BackwardMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(0)


class _BackwardNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.norm()


class _BackwardValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].abs().max()


def capacity(x: Tensor) -> Tensor:
    """An expert with room for two: later samples that choose it are dropped."""
    chosen = x[:, 0] > 0
    return x * ((chosen.cumsum(0) <= 2) | ~chosen)[:, None]


def contrastive(x: Tensor) -> Tensor:
    return (x @ x.T).log_softmax(-1).diagonal()[:, None]


def program_of(module: nn.Module) -> tuple[BlockProgram, dict[str, Tensor]]:
    torch.manual_seed(0)
    blocks = [
        Block("before", nn.Linear(D, D), ("x",), ("h",)),
        Block("middle", module, ("h",), ("h",)),
        Block("after", nn.Linear(D, 1), ("h",), ("losses",)),
    ]
    program = BlockProgram(blocks, inputs=("x", "sample_id"), outputs=("losses",))
    return program, {"x": torch.randn(B, D), "sample_id": torch.arange(B) + 40}


def middle(module: nn.Module) -> Any:
    program, batch = program_of(module)
    return trace(program, batch, num_microbatches=1, repeats=1).blocks[1]


def clip_by_batch_norm(x: Tensor) -> Tensor:
    """Clipping by the norm of the whole batch; does nothing until the norm is large."""
    return x * (50.0 / x.norm()).clamp(max=1.0)


def ranks(x: Tensor) -> Tensor:
    return x + x.argsort(0).argsort(0)


def batch_size(x: Tensor) -> Tensor:
    return x / x.shape[0]


# What mixes, and the operation that the error must name ("" where autograd hides it).
MIXING: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "minus the mean": (lambda x: x - x.mean(0), "in mean "),
    "softmax over the batch": (lambda x: x.softmax(0), "in softmax "),
    "saturated softmax": (lambda x: (1000 * x).softmax(0) + x, "in softmax "),
    "rank": (ranks, r"in argsort \(test_lineage.py, line \d+: return x \+ x.argsort\(0\)"),
    "arg-max": (lambda x: x * (torch.arange(B) == x[:, 0].argmax())[:, None], "in argmax "),
    "cumulative sum": (lambda x: x.cumsum(0), "in cumsum "),
    "clamp by the maximum": (lambda x: x.clamp(max=x.max() * 0.99), "in max "),
    "small influence": (lambda x: x / (1e6 + x.abs().amax()) * 1e6, "in amax "),
    "capacity": (capacity, "in cumsum "),
    "clipping by a batch norm": (clip_by_batch_norm, "in norm "),
    "contrastive scores": (lambda x: contrastive(x).expand(-1, D), "in (matmul|__matmul__|mm) "),
    "number of samples": (batch_size, "depends on how many samples"),
    "backward mean": (_BackwardMean.apply, "in the backward"),
    "backward norm": (_BackwardNorm.apply, "in the backward"),
    "backward values": (_BackwardValues.apply, "in the backward"),
}


@pytest.mark.parametrize("what", MIXING)
def test_mixing_is_found_and_named(what: str) -> None:
    function, named = MIXING[what]
    program, batch = program_of(nn.Sequential(nn.Identity(), Apply(function)))
    profile = trace(program, batch, num_microbatches=1, repeats=1)
    found = profile.blocks[1]
    assert (found.lineage, found.stateful) == ("batch", False)
    path = r"middle \(Sequential\)" if "number" in what else r"middle\.1 \(Apply\)"
    with pytest.raises(ValueError, match=rf"block 'middle' mixes samples of the whole batch.* {path}.*{named}.*Remed"):
        require_sample_lineage(profile)


def test_a_transposed_layout_is_no_false_lead() -> None:
    """The batch is on axis 1 (length first) while the mean is taken; the mean is named, not the transpose."""

    def function(x: Tensor) -> Tensor:
        y = x[:, None].expand(-1, 2 * B, -1).transpose(0, 1) * 2
        return (y - y.mean(1, keepdim=True)).transpose(0, 1)[:, 0]

    found = middle(Apply(function))
    assert "in mean (test_lineage.py" in found.mixes


def test_flipping_the_batch_is_found() -> None:
    assert middle(Apply(lambda x: x.flip(0))).lineage == "group"  # rows move each other in pairs


def test_mixing_within_fixed_groups_is_group() -> None:
    found = middle(Apply(lambda x: x - x.view(3, 2, D).mean(1, keepdim=True).expand(3, 2, D).reshape(B, D)))
    assert found.lineage == "group"


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.GELU()),
        keyed.KeyedDropout(0.5),
        nn.BatchNorm1d(D).eval(),
        nn.Dropout(0.5).eval(),
        Apply(lambda x: x.relu_()),
        Apply(lambda x: torch.where(x > 0, x, torch.zeros_like(x)).clamp(max=1.0)),
    ],
)
def test_no_false_alarm(module: nn.Module) -> None:
    found = middle(module)
    assert (found.lineage, found.stateful, found.mixes) == ("sample", False, "")


def test_a_whole_model_is_sample() -> None:
    profile = trace(fid_program(), fid_batch(), num_microbatches=3, repeats=1)
    require_sample_lineage(profile)
    assert [b.lineage for b in profile.blocks] == ["sample"] * 6


def test_batch_norm_is_named_with_its_path_and_nothing_is_changed() -> None:
    inner = nn.Sequential(nn.Linear(D, D), nn.Sequential(nn.ReLU(), nn.BatchNorm1d(D)))
    program, batch = program_of(inner)
    before = {name: value.clone() for name, value in program.state_dict().items()}
    profile = trace(program, batch, num_microbatches=2, repeats=1)
    assert (profile.blocks[1].lineage, profile.blocks[1].stateful) == ("batch", True)
    assert all(torch.equal(value, before[name]) for name, value in program.state_dict().items())
    with pytest.raises(
        ValueError, match=r"block 'middle' mixes .* middle\.1\.1 \(BatchNorm1d\).*Freeze the batch norm"
    ):
        require_sample_lineage(profile)


def test_generator_state_and_counters_are_refused() -> None:
    program, batch = program_of(nn.Sequential(nn.ReLU(), nn.Dropout(0.5)))
    with pytest.raises(ValueError, match=r"in middle\.1 \(Dropout\), in dropout.*generator state.*make_keyed"):
        require_sample_lineage(trace(program, batch, num_microbatches=1, repeats=1))

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x

    program, batch = program_of(nn.Sequential(nn.ReLU(), Counter()))
    with pytest.raises(ValueError, match=r"changes buffers in the forward \(middle\.1\.calls \(Counter\)\).*Remedies"):
        require_sample_lineage(trace(program, batch, num_microbatches=1, repeats=1))


def rarely(x: Tensor) -> Tensor:
    return torch.where(torch.rand(()) < 1e-30, -x, x)


def little(x: Tensor) -> Tensor:
    return x + 1e-4 * torch.randn_like(x)


@pytest.mark.parametrize(("function", "named"), [(little, "in randn_like"), (rarely, "")])
def test_a_draw_counts_however_little_it_changes(function: Callable[[Tensor], Tensor], named: str) -> None:
    program, batch = program_of(nn.Sequential(nn.ReLU(), Apply(function)))
    with pytest.raises(ValueError, match=rf"in middle.*{named}.*moves torch's global generator.*make_keyed"):
        require_sample_lineage(trace(program, batch, num_microbatches=1, repeats=1))


class Rebinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean + 1
        return x


def test_a_buffer_that_a_forward_rebinds_is_put_back() -> None:
    module = Rebinds()
    buffer = module.mean
    assert middle(module).stateful
    assert module.mean is buffer and buffer == 0


def test_no_remedy_is_one_that_would_be_refused() -> None:
    program, batch = program_of(Apply(lambda x: x - x.mean(0)))
    with pytest.raises(ValueError) as caught:  # although there is one micro-batch
        require_sample_lineage(trace(program, batch, num_microbatches=1, repeats=1))
    assert "one micro-batch" not in str(caught.value)
    remedies: dict[str, Callable[[nn.Module], nn.Module]] = {
        "freeze_batch_norm(module)": freeze_batch_norm,
        "batch_norm_to_group_norm(module, num_groups=...)": lambda m: batch_norm_to_group_norm(m, num_groups=1),
        "batch_norm_to_layer_norm": batch_norm_to_layer_norm,
        "synchronise_batch_norm(module, num_microbatches=1, group=...)": lambda m: synchronise_batch_norm(
            m, num_microbatches=1
        ),
    }
    for named, convert in remedies.items():
        program, batch = program_of(nn.BatchNorm1d(D))
        with pytest.raises(ValueError) as caught:
            require_sample_lineage(trace(program, batch, num_microbatches=1, repeats=1))
        assert named in str(caught.value)
        convert(program)
        require_sample_lineage(trace(program, batch, num_microbatches=1, repeats=1))


def test_a_synchronised_norm_passes_with_one_micro_batch_and_nothing_else_beside_it() -> None:
    def found(module: nn.Module, count: int) -> Any:
        program, batch = program_of(module)
        before = {name: value.clone() for name, value in program.state_dict().items()}
        profile = trace(synchronise_batch_norm(program, num_microbatches=1), batch, num_microbatches=count, repeats=1)
        assert all(torch.equal(value, before[name]) for name, value in program.state_dict().items())
        assert profile.blocks[1].lineage == "batch" and profile.blocks[1].stateful
        return profile

    require_sample_lineage(found(nn.BatchNorm1d(D), 1))
    with pytest.raises(ValueError, match=r"middle \(SynchronisedBatchNorm\).*single micro-batch"):
        require_sample_lineage(found(nn.BatchNorm1d(D), 2))
    for other in (Apply(lambda x: x - x.mean(0)), Rebinds()):
        with pytest.raises(ValueError, match="block 'middle' mixes"):
            require_sample_lineage(found(nn.Sequential(nn.BatchNorm1d(D), other), 1))


class Documents(nn.Module):
    """Context of each sample: its K documents out of the U unique ones of the batch."""

    def forward(self, documents_UD: Tensor, index_BK: Tensor) -> Tensor:
        return documents_UD[index_BK].flatten(1)


class EncodeDocuments(nn.Module):
    def __init__(self, dropout: nn.Module, by_document: bool) -> None:
        super().__init__()
        self.linear, self.dropout, self.by_document = nn.Linear(D, D), dropout, by_document

    def forward(self, documents_UD: Tensor, id_U: Tensor) -> Tensor:
        if not self.by_document:
            return self.dropout(self.linear(documents_UD))
        with keyed.rows(id_U):
            return self.dropout(self.linear(documents_UD))


def document_program(*, by_document: bool = True, p: float = 0.5) -> tuple[BlockProgram, dict[str, Tensor]]:
    torch.manual_seed(0)
    k = 2
    blocks = [
        Block("encode", EncodeDocuments(keyed.KeyedDropout(p), by_document), ("documents", "id"), ("encoded",)),
        Block("gather", Documents(), ("encoded", "index"), ("h",)),
        Block("head", nn.Sequential(nn.Linear(k * D, 4), nn.Tanh(), nn.Linear(4, 1)), ("h",), ("losses",)),
    ]
    program = BlockProgram(
        blocks,
        inputs=("sample_id", "documents", "id", "index"),
        outputs=("losses",),
        axes={"documents": None, "id": None, "encoded": None},
    ).double()
    batch = {
        "sample_id": torch.arange(B) + 40,
        "documents": torch.randn(B, D, dtype=torch.float64).requires_grad_(),
        "id": torch.arange(B) * 7,
        "index": torch.tensor([[0, 1], [1, 2], [0, 2], [3, 4], [4, 3], [5, 5]]),
    }
    return program, batch


def test_a_gather_of_shared_documents_is_group_and_may_be_micro_batched() -> None:
    program, batch = document_program()
    profile = trace(program, batch, num_microbatches=3, repeats=1)
    assert [b.lineage for b in profile.blocks] == ["sample", "group", "sample"]
    assert profile.blocks[1].shared == ("encoded",) and profile.blocks[1].mixes == ""
    require_sample_lineage(profile)
    right = whole_batch_gradients(program, batch, seed=0, step=0)
    total = {name: torch.zeros_like(g) for name, g in (right.gradients | right.input_gradients).items()}
    for i in range(3):
        part = whole_batch_gradients(program, program.microbatch(batch, i, 3), seed=0, step=0)
        for name, grad in (part.gradients | part.input_gradients).items():
            total[name] += grad
    report = gradient_report(right.gradients | right.input_gradients, total, tolerance=1e-12)
    assert report, report.message


def test_document_dropout_by_sample_ids_is_found() -> None:
    program, batch = document_program(by_document=False)
    profile = trace(program, batch, num_microbatches=1, repeats=1)
    with pytest.raises(ValueError, match=r"block 'encode' mixes .*follow the samples' ids.*keyed\.rows"):
        require_sample_lineage(profile)


def test_a_table_that_everybody_reads_is_no_group() -> None:
    class Rotate(nn.Module):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return x * table.sum(1)

    program = BlockProgram(
        [Block("b", Rotate(), ("x", "table"), ("losses",))],
        inputs=("x", "table"), outputs=("losses",), axes={"table": None},
    )  # fmt: skip
    profile = trace(program, {"x": torch.randn(B, D), "table": torch.randn(D, 8)}, num_microbatches=1, repeats=1)
    assert (profile.blocks[0].lineage, profile.blocks[0].shared) == ("sample", ())


def test_a_gather_from_rows_of_other_samples_is_a_group_that_is_refused() -> None:
    """Documents dealt out as one row a sample: a micro-batch would not have the rows of the others."""
    program = BlockProgram(
        [Block("gather", Documents(), ("documents", "index"), ("losses",))],
        inputs=("documents", "index"), outputs=("losses",),
    )  # fmt: skip
    index = torch.tensor([[0, 1], [1, 0], [0, 0], [3, 4], [4, 3], [5, 5]])
    profile = trace(program, {"documents": torch.randn(B, D), "index": index}, num_microbatches=1, repeats=1)
    assert profile.blocks[0].lineage == "group" and profile.blocks[0].shared == ()
    with pytest.raises(ValueError, match="mixes samples of its group"):
        require_sample_lineage(profile)


def test_batch_norm_that_uses_batch_statistics_in_eval_mode() -> None:
    assert middle(nn.BatchNorm1d(D, track_running_stats=False).eval()).lineage == "batch"


def test_a_fixed_batch_size_is_found() -> None:
    """It fits the whole batch only: a loss that reshapes by a constant."""
    found = middle(Apply(lambda x: x.reshape(B, D)))
    assert found.lineage == "batch" and "fails on a part of the batch (RuntimeError" in found.mixes


def test_integer_inputs_are_tested_too() -> None:
    class Duplicates(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return (ids[:, None] == ids[None, :]).sum(1, keepdim=True).float()

    program = BlockProgram([Block("b", Duplicates(), ("ids",), ("losses",))], inputs=("ids",), outputs=("losses",))
    profile = trace(program, {"ids": torch.tensor([1, 2, 3, 4, 5, 6])}, num_microbatches=1, repeats=1)
    assert profile.blocks[0].lineage != "sample"
