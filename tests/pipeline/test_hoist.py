"""A contrastive loss over the whole batch on a tower that is cut and micro-batched, against one plain graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeline import Block, BlockProgram, Plan
from pipeline.hoist import Tower
from pipeline.keyed import KeyedDropout, scope
from pipeline.verify import gradient_report
from tests.distributed import run_on_ranks


def tower_program() -> BlockProgram:
    torch.manual_seed(0)
    shared = nn.Linear(6, 6)
    return BlockProgram(
        [
            Block("first", nn.Sequential(shared, nn.Tanh(), KeyedDropout(0.3)), ("x",), ("h",)),
            Block("second", nn.Sequential(shared, nn.Tanh()), ("h",), ("h",)),
            Block("third", nn.Linear(6, 4), ("h",), ("embedding",)),
        ],
        inputs=("sample_id", "x"),
        outputs=("embedding",),
    ).double()


def rows(count: int, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"sample_id": torch.arange(count) + 100 * seed, "x": torch.randn(count, 6, generator=g).double()}


def contrastive(query: Tensor, document: Tensor) -> Tensor:
    """Query i belongs to document i % U; every row is everybody else's negative."""
    target = torch.arange(query.shape[0]) % document.shape[0]
    return nn.functional.cross_entropy(3.0 * query @ document.T, target)


def right() -> tuple[float, dict[str, Tensor]]:
    program = tower_program()
    with scope(seed=1, step=2):
        query, document = (program.run(rows(n, s))["embedding"] for n, s in ((7, 1), (5, 2)))
    loss = contrastive(query, document)
    names = program.named_parameters_global()
    return loss.item(), dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True))


def _hoisted(cuts: list[int]) -> tuple[float, dict[str, Tensor]]:
    program = tower_program()
    tower = Tower(program, Plan.from_cuts(program, cuts, num_microbatches=4), timeout_s=30)
    tower.pipeline.release_other_stages()
    batches = (rows(7, 1), rows(5, 2))  # neither divides into four
    leaves = [tower.embed(b, seed=1, step=2)["embedding"].requires_grad_() for b in batches]
    loss = contrastive(*leaves)
    loss.backward()
    for batch, leaf in zip(batches, leaves, strict=True):
        assert leaf.grad is not None
        tower.backward(batch, {"embedding": leaf.grad}, seed=1, step=2)
    return loss.item(), {n: p.grad for n, p in tower.pipeline.parameters_here.items() if p.grad is not None}


@pytest.mark.parametrize("cuts", [[], [1], [1, 2]])
def test_a_hoisted_loss_has_the_gradients_of_one_graph(cuts: list[int]) -> None:
    ranks = [_hoisted(cuts)] if not cuts else run_on_ranks(_hoisted, len(cuts) + 1, cuts)
    loss, gradients = right()
    seen: set[str] = set()
    for found, here in ranks:
        assert found == pytest.approx(loss, rel=1e-12)
        report = gradient_report(gradients, here, tolerance=1e-10)
        assert report, report.message
        seen |= set(here)
    assert seen == set(gradients)


def test_mistakes() -> None:
    program = tower_program()
    tower = Tower(program, Plan.from_cuts(program, []))
    with pytest.raises(ValueError, match=r"no gradient for output 'embedding' \(did you mean 'embeddings'"):
        tower.backward(rows(2, 1), {"embeddings": torch.zeros(2, 4)}, seed=0, step=0)
