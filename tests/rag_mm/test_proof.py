"""`prove` on two real stages: the right program passes in every mode, and wrong variants are named.

Each variant is a mistake that a framework of this kind makes easily. ``staged`` compares a layout with itself on one
micro-batch, so it cannot see what does not depend on micro-batches; that is asserted too, as what the mode is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from pipeline import Block, BlockProgram, Pipeline, Plan
from pipeline.keyed import KeyedDropout
from pipeline.ties import Ties
from rag_mm import proof
from rag_mm.config import Config
from rag_mm.prepared import Prepared
from rag_mm.proof import ProofError, prove
from rag_mm.reader.head import LossHead
from rag_mm.step import JointStep
from tests.distributed import run_on_ranks
from tests.rag_mm.joint_setup import READER, build, config, make_pipeline, prepare

MODES = ("full", "staged", "shrunk")


def _right(joint: JointStep, prepared: Prepared) -> AbstractContextManager[Any]:
    return nullcontext()


def _generator_dropout(joint: JointStep, prepared: Prepared) -> AbstractContextManager[Any]:
    """Masks from generator state: other ones for every run and every cut of the batch."""

    def forward(self: KeyedDropout, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, self.p, self.training)

    return patch.object(KeyedDropout, "forward", forward)


def _every_occurrence(joint: JointStep, prepared: Prepared) -> AbstractContextManager[Any]:
    """A document's gradient, already summed over its readers, given to each of them once more."""
    counts = torch.bincount(prepared.read, minlength=prepared.document_embedding.shape[0]).clamp(min=1)
    backward = joint.towers.backward

    def again(features: dict[str, Tensor], grad_NE: Tensor) -> None:
        backward(features, grad_NE * counts.unsqueeze(1) if features is prepared.document else grad_NE)

    return patch.object(joint.towers, "backward", again)


def _unsynchronised_tie(joint: JointStep, prepared: Prepared) -> AbstractContextManager[Any]:
    """Every stage keeps its own part of the tied embedding's gradient."""
    return patch.object(Ties, "reduce", lambda self, before, *, device: None)


def _mean_of_means(joint: JointStep, prepared: Prepared) -> AbstractContextManager[Any]:
    """Each micro-batch's loss is a mean over its own tokens, and those are averaged."""
    outputs, num_samples = LossHead.outputs, len(prepared.samples)

    def averaged(
        self: LossHead, fused: Any, alone: Any, targets: Any, *more: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        losses, statistics = outputs(self, fused, alone, targets, *more, **named)
        share = targets.sample_weight_B.shape[0] / num_samples
        return losses / targets.target_weight_BT.sum() * share, statistics

    return patch.object(LossHead, "outputs", averaged)


def _a_constant(joint: JointStep, prepared: Prepared) -> AbstractContextManager[Any]:
    """Micro-batches add something that has no gradient."""
    outputs, num_samples = LossHead.outputs, len(prepared.samples)

    def shifted(
        self: LossHead, fused: Any, alone: Any, targets: Any, *more: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        losses, statistics = outputs(self, fused, alone, targets, *more, **named)
        return losses + (targets.sample_weight_B.shape[0] < num_samples), statistics

    return patch.object(LossHead, "outputs", shifted)


Variant = Callable[[JointStep, Prepared], AbstractContextManager[Any]]


def _verdicts(
    variant: Variant, fusion: str, schedule: str, modes: tuple[str, ...], directory: Path, run_dir: Path
) -> dict[str, str]:
    """What each mode says of a layout: the line for the log, or the error."""
    found = {}
    for mode in modes:
        settings = config(
            directory, ranks=2, schedule=schedule, reader=replace(READER, fusion=fusion), parallel={"verify": mode}
        )
        joint, reader = build(settings, run_dir)
        pipeline = make_pipeline(settings, joint, reader)
        prepared = prepare(joint)
        with variant(joint, prepared):
            try:
                found[mode] = prove(settings, joint, prepared, pipeline)
            except ProofError as error:
                found[mode] = str(error)
    return found


@pytest.mark.parametrize("fusion, schedule", [("fid", "1f1b"), ("prepend", "interleaved")])
def test_the_right_program_passes_in_every_mode(factbook_dir: Path, tmp_path: Path, fusion: str, schedule: str) -> None:
    first, second = run_on_ranks(_verdicts, 2, _right, fusion, schedule, MODES, factbook_dir, tmp_path)
    assert first == second
    for mode in MODES:
        assert re.match(
            rf"proof: {mode}, loss and \d+ gradients agree with one device, largest error \d\.\de-0[67]", first[mode]
        )


@pytest.mark.parametrize(
    "variant, named, seen_by",
    [
        (_generator_dropout, r"reader\.", MODES),
        (_every_occurrence, r"retriever\.", ("full", "shrunk")),
        (_unsynchronised_tie, r"reader\.embed\.tokens\.token\.weight", ("full", "shrunk")),
        (_mean_of_means, r"reader\.", MODES),
    ],
)
def test_wrong_variants_are_refused_and_named(
    factbook_dir: Path, tmp_path: Path, variant: Variant, named: str, seen_by: tuple[str, ...]
) -> None:
    ranks = run_on_ranks(_verdicts, 2, variant, "fid", "1f1b", MODES, factbook_dir, tmp_path)
    for verdicts in ranks:
        for mode in MODES:
            if mode in seen_by:
                assert f"parallel.verify {mode} failed; training does not start" in verdicts[mode]
                assert re.search(rf"rank [01]: (.|\n)*\n  {named}", verdicts[mode]), verdicts[mode]
            else:
                assert verdicts[mode].startswith("proof: staged"), verdicts[mode]


def test_a_wrong_loss_with_right_gradients_is_refused(factbook_dir: Path, tmp_path: Path) -> None:
    ranks = run_on_ranks(_verdicts, 2, _a_constant, "fid", "1f1b", MODES, factbook_dir, tmp_path)
    for verdicts in ranks:
        for mode in MODES:
            assert re.search(
                rf"parallel.verify {mode} failed(.|\n)*the loss is \S+, \S+ would be right", verdicts[mode]
            )


def _shrunk_on_many_stages(directory: Path, run_dir: Path) -> str:
    reader = replace(READER, encoder_layers=2, decoder_layers=3)  # nine blocks; six with a layer of each kind
    settings = config(
        directory, ranks=4, schedule="interleaved", num_microbatches=4, reader=reader, parallel={"verify": "shrunk"}
    )
    joint, program = build(settings, run_dir)
    return prove(settings, joint, prepare(joint), make_pipeline(settings, joint, program))


def test_shrunk_keeps_a_block_for_every_stage(factbook_dir: Path, tmp_path: Path) -> None:
    assert all(
        line.startswith("proof: shrunk") for line in run_on_ranks(_shrunk_on_many_stages, 4, factbook_dir, tmp_path)
    )


def _with_tables(layers: int) -> BlockProgram:
    tables = [Block(f"table.{i}", nn.Identity(), ("x",), (f"t{i}",), recomputable=True) for i in range(layers)]
    reading = Block("loss", _Sum(), ("x", *(f"t{i}" for i in range(layers))), ("losses",))
    return BlockProgram([*tables, reading], inputs=("x",), outputs=("losses",))


class _Sum(nn.Module):
    def forward(self, *parts: Tensor) -> Tensor:
        return torch.stack(parts).sum(0)


def test_shrunk_computes_again_what_the_plan_does(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _with_tables(3)
    plan = Plan.from_cuts(whole, [3], schedule="interleaved", num_ranks=1, recomputed=["table.1", "table.2"])
    monkeypatch.setattr(proof, "_narrow", lambda config, joint, *, layers: _with_tables(2))
    joint = cast(JointStep, SimpleNamespace(mesh=None))
    small, _ = proof._shrunk(Config(), joint, Pipeline(whole, plan), None)
    assert small.plan.recomputed == ("table.1",) and small.plan.num_stages == 2
