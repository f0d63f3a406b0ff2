"""What readers say of each document alone, against the slow twin: the reader given that document only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline import trace
from pipeline.verify import WholeBatch, gradient_report, whole_batch_gradients
from rag_mm.objectives import ObjectivesConfig
from tests.rag_mm.joint_setup import build, config, make_pipeline, prepare
from tests.rag_mm.reader_batch import reader, reader_batch

FUSIONS = ["fid", "prepend"]
PAIRS = ("document", "document_match", "document_image", "context_mask", "context_token", "document_embedding")


def single_document(batch: dict[str, Tensor], place: int, k: int) -> dict[str, Tensor]:
    """The same samples with document ``place`` of each, and the weights of a plain sum over tokens."""
    rows = {n: t[place::k] if n in PAIRS else t for n, t in batch.items()}
    return {**rows, "target_weight": (batch["target"] != 0).double()}


def log_likelihoods(fusion: str, batch: dict[str, Tensor], k: int, *, dropout: float = 0.0) -> Tensor:
    """log p(a | q, z_k) of every document (B, k), by one run of the whole program each."""
    program = reader(fusion, dropout=dropout).eval()
    with torch.no_grad():
        runs = [program.run(single_document(batch, place, k))["losses"][:, 0] for place in range(k)]
    return -torch.stack(runs, dim=1)


def scores(batch: dict[str, Tensor], k: int) -> Tensor:
    documents = batch["document_embedding"].detach().unflatten(0, (-1, k))
    return torch.einsum("be,bke->bk", batch["query_embedding"].detach(), documents)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_rag_sequence_is_the_marginal_over_single_documents(fusion: str) -> None:
    k, batch = 3, reader_batch(k=3)
    found = reader(fusion, rag_sequence=1.0).run(batch)["losses"][:, 1]
    joint = scores(batch, k).softmax(1) * log_likelihoods(fusion, batch, k).exp()
    torch.testing.assert_close(found, -batch["sample_weight"] * joint.sum(1).log(), atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_gradients_of_rag_sequence_are_those_of_single_documents(fusion: str) -> None:
    """Every parameter's, through every path: none may be detached on the way."""
    k, batch = 2, reader_batch()
    found = whole_batch_gradients(reader(fusion, generation=0.0, rag_sequence=1.0), batch, seed=0, step=0)
    twin = reader(fusion)
    single = [twin.run(single_document(batch, place, k))["losses"][:, 0] for place in range(k)]
    joint = scores(batch, k).softmax(1) * torch.stack(single, dim=1).neg().exp()
    loss = -(batch["sample_weight"] * joint.sum(1).log()).sum()
    parameters = twin.named_parameters_global()
    right = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    named = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parameters.items(), right, strict=True)}
    report = gradient_report(named, found.gradients, tolerance=1e-10)
    assert report and report.num_compared == len(parameters), report.message


@pytest.mark.parametrize("fusion", FUSIONS)
def test_distillation_sees_single_documents_without_the_decoders_dropout(fusion: str) -> None:
    k, batch = 2, reader_batch()
    program = reader(fusion, dropout=0.0 if fusion == "fid" else 0.5, emdr2=1.0).train()
    joint = (scores(batch, k) / 0.1).softmax(1) * log_likelihoods(fusion, batch, k).exp()
    found = whole_batch_gradients(program, batch, seed=0, step=0).outputs["losses"][:, 1]
    torch.testing.assert_close(found, -batch["distill_weight"] * joint.sum(1).log(), atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize(
    "objective, moves", [("pdist", False), ("emdr2", False), ("rag_sequence", True), ("rag_token", True)]
)
def test_which_objectives_move_the_reader(fusion: str, objective: str, moves: bool) -> None:
    """All of them move the scores. The generation loss is weighed by nothing here, so it moves neither."""
    batch = reader_batch()
    names = ("generation", objective) if not moves else (objective,)
    program = reader(fusion, **{"generation": 0.0, **dict.fromkeys(names, 1.0)})
    if not moves:
        batch["target_weight"] = batch["target_weight"] * 1e-300  # still says which tokens are targets
    found = whole_batch_gradients(program, batch, seed=0, step=0)
    assert found.outputs["losses"].shape[1] == len(names)
    largest = max(g.abs().max().item() for g in found.gradients.values())
    assert (largest > 1e-3) == moves
    assert all(g.abs().max() > 1e-4 for g in found.input_gradients.values())


@pytest.mark.parametrize("fusion", FUSIONS)
def test_streams_of_rag_objectives_have_dropout(fusion: str) -> None:
    batch, program = reader_batch(), reader(fusion, dropout=0.5, rag_token=1.0)
    trained = whole_batch_gradients(program.train(), batch, seed=0, step=0).outputs["losses"][:, 1]
    again = whole_batch_gradients(program.train(), batch, seed=0, step=0).outputs["losses"][:, 1]
    plain = whole_batch_gradients(program.eval(), batch, seed=0, step=0).outputs["losses"][:, 1]
    assert torch.equal(trained, again) and not torch.allclose(trained, plain, rtol=1e-3)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_both_kinds_of_streams_at_once_are_what_each_is_by_itself(fusion: str) -> None:
    """pdist reads without dropout and graph although rag_sequence, beside it, reads with both."""
    batch, loss = reader_batch(), {"generation": 0.0}

    def run(**objectives: float) -> WholeBatch:
        program = reader(fusion, dropout=0.5, **loss, **objectives).train()
        return whole_batch_gradients(program, batch, seed=0, step=0)

    both, pdist, marginal = run(pdist=1.0, rag_sequence=1.0), run(pdist=1.0), run(rag_sequence=1.0)
    right = torch.cat([pdist.outputs["losses"], marginal.outputs["losses"]], dim=1)
    torch.testing.assert_close(both.outputs["losses"], right, atol=1e-12, rtol=1e-10)
    for kind in ("gradients", "input_gradients"):
        one, other = getattr(pdist, kind), getattr(marginal, kind)
        report = gradient_report({n: one[n] + other[n] for n in one}, getattr(both, kind), tolerance=1e-10)
        assert report and report.num_compared == len(one), report.message


@pytest.mark.parametrize("fusion", FUSIONS)
def test_pdist_beside_rag_sequence_is_that_of_single_documents(fusion: str) -> None:
    """Against one run of the whole program for each document, without dropout."""
    k, batch = 2, reader_batch()
    program = reader(fusion, dropout=0.0 if fusion == "fid" else 0.5, pdist=1.0, rag_sequence=1.0).train()
    mean = log_likelihoods(fusion, batch, k) / (batch["target"] != 0).sum(1, keepdim=True)
    target, score = (mean / 0.5).softmax(1), (scores(batch, k) / 0.1).log_softmax(1)
    right = batch["distill_weight"] * (target * (target.log() - score)).sum(1)
    found = whole_batch_gradients(program, batch, seed=0, step=0).outputs["losses"][:, 1]
    torch.testing.assert_close(found, right, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_the_planner_counts_both_streams(fusion: str) -> None:
    batch = reader_batch()

    def layer(**objectives: float) -> tuple[int, int, int]:
        """Operations of the last layer, and what it sends on and gets back."""
        profile = trace(reader(fusion, **objectives), batch, num_microbatches=1, repeats=1, warmup=0, lineage=False)
        return profile.blocks[-2].flops, profile.carry_bytes[-2], profile.gradient_bytes[-2]

    none, alone, marginal, both = layer(), layer(pdist=1.0), layer(rag_token=1.0), layer(pdist=1.0, rag_token=1.0)
    assert none[0] < marginal[0] == alone[0] < both[0]
    assert alone[1] - none[1] == marginal[1] - none[1] == both[1] - alone[1] > 0
    assert alone[2] == none[2] and both[2] == marginal[2] == none[2] + (marginal[1] - none[1])


def test_only_distillation_waits_for_a_reader_that_can_read(factbook_dir: Path, tmp_path: Path) -> None:
    """`train.distill_share` holds back what teaches the retriever, not what teaches the reader."""
    objectives = ObjectivesConfig(pdist=1.0, rag_sequence=1.0, rag_token=1.0)
    settings = config(factbook_dir, objectives=objectives, distill_share=0.5)
    joint, program = build(settings, tmp_path)
    pipeline = make_pipeline(settings, joint, program)
    early = joint.gradients(prepare(joint, step=1), pipeline).losses
    late = joint.gradients(joint.prepare(2), pipeline).losses
    assert early["pdist"] == 0 and min(early["rag_sequence"], early["rag_token"]) > 1
    assert min(late["pdist"], late["rag_sequence"], late["rag_token"]) > 0.01
