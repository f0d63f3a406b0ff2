"""Keyed draws: independent of the layout, and good enough to be masks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline import keyed


def draw(
    ids: torch.Tensor, *, seed: int = 0, step: int = 0, name: str = "b", row: int = 1000, k: int = 1
) -> torch.Tensor:
    with keyed.scope(seed=seed, step=step), keyed.block(name, ids=ids):
        return keyed.uniform((row,), rows_per_sample=k, dtype=torch.float64)


def test_uniform_and_independent() -> None:
    u = draw(torch.arange(200), row=2000)
    n = u.numel()
    assert u.min() >= 0 and u.max() < 1
    counts = torch.histc(u, 256, 0, 1)
    chi2 = ((counts - n / 256) ** 2 / (n / 256)).sum().item()
    assert 165 < chi2 < 360  # 255 degrees of freedom, about 4.5 sigma
    for other in (
        u.roll(1, 1), u.roll(1, 0), u.roll(64, 1), draw(torch.arange(200), row=2000, step=1),
        draw(torch.arange(200), row=2000, seed=1), draw(torch.arange(200), row=2000, name="c"),
    ):  # fmt: skip
        correlation = torch.corrcoef(torch.stack([u.flatten(), other.flatten()]))[0, 1].item()
        assert abs(correlation) < 5 / n**0.5
    cells = (u[:, ::2] * 16).long() * 16 + (u[:, 1::2] * 16).long()  # pairs of neighbours in a square
    counts = torch.bincount(cells.flatten(), minlength=256).double()
    assert 165 < ((counts - n / 512) ** 2 / (n / 512)).sum().item() < 360
    row_means = (u.mean(1) - 0.5) * (12 * 2000) ** 0.5
    assert abs(row_means.std().item() - 1) < 0.25
    assert u.flatten().unique().numel() == n


def test_every_bit_of_a_key_moves_every_top_bit() -> None:
    """Strict avalanche: half of the top bits flip with any input bit. One hash round is off by 0.49, two by 0.011."""
    g = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**63), 2**63 - 1, (20_000,), generator=g)
    base = keyed._mix(x.clone())
    for bit in range(64):
        flipped = base ^ keyed._mix(x ^ keyed._signed(1 << bit))
        for top in range(63, 39, -1):
            share = (flipped >> top & 1).double().mean().item()
            assert abs(share - 0.5) < 0.02, f"input bit {bit} flips bit {top} in {share:.3f} of all cases"


def test_what_a_draw_is_for_is_hashed_in_twice() -> None:
    """An id and a step whose sum is another id's and step's sum: hashed once, the two would have the same draws."""
    bases = [keyed.seed_of(0, step, "b", 0) for step in (0, 1)]
    here, there = torch.tensor([3]), torch.tensor([keyed._signed(3 + bases[0] - bases[1])])
    assert not torch.equal(draw(here, step=0), draw(there, step=1))


def test_rows_may_have_ids_of_their_own() -> None:
    """A document's draw is its own, whichever samples are there and whatever their number."""
    documents, x = torch.tensor([4, 9, 5]), torch.ones(3, 200)

    def dropped(samples: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        with keyed.scope(seed=0, step=0), keyed.block("b", ids=samples):
            with keyed.rows(rows):
                first = keyed.dropout(x[: len(rows)], 0.5)
            return torch.cat([first, keyed.dropout(torch.ones(len(samples), 200), 0.5)])

    whole = dropped(torch.arange(2), documents)
    assert torch.equal(dropped(torch.arange(4), documents)[:3], whole[:3])
    assert torch.equal(dropped(torch.arange(2), documents[1:])[:2], whole[1:3])
    assert torch.equal(dropped(torch.arange(2), documents + 50)[3:], whole[3:])  # the samples' draws are as before
    assert not torch.equal(dropped(torch.arange(2), documents + 50)[:3], whole[:3])
    with pytest.raises(RuntimeError, match="no block here"), keyed.rows(documents):
        pass


def test_depends_on_sample_not_on_company() -> None:
    ids = torch.tensor([5, 900, 17, 2**40])
    whole = draw(ids, k=3).view(4, 3, -1)
    for i in range(4):
        assert torch.equal(draw(ids[i : i + 1], k=3).view(3, -1), whole[i])
    assert not torch.equal(whole[0, 0], whole[0, 1])


def test_calls_in_a_block_differ_and_repeat() -> None:
    def two() -> tuple[torch.Tensor, torch.Tensor]:
        with keyed.scope(seed=0, step=0), keyed.block("b", ids=torch.arange(4)):
            return keyed.uniform((8,)), keyed.uniform((8,))

    (a, b), (c, d) = two(), two()
    assert not torch.equal(a, b) and torch.equal(a, c) and torch.equal(b, d)


def test_dropout() -> None:
    drop, x = keyed.KeyedDropout(0.25), torch.ones(8 * 2, 5000)
    with keyed.scope(seed=0, step=0), keyed.block("b", ids=torch.arange(8)):
        y = drop(x)
    assert y.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert abs((y == 0).double().mean().item() - 0.25) < 5 * (0.25 * 0.75 / y.numel()) ** 0.5
    assert drop.eval()(x) is x and keyed.KeyedDropout(0.0)(x) is x


def test_errors() -> None:
    with pytest.raises(RuntimeError, match=r"keyed\.scope"):
        keyed.KeyedDropout(0.5)(torch.ones(2, 2))
    with (
        keyed.scope(seed=0, step=0),
        keyed.block("b", ids=None),
        pytest.raises(RuntimeError, match="sample_id"),
    ):
        keyed.KeyedDropout(0.5)(torch.ones(2, 2))
    with (
        keyed.scope(seed=0, step=0),
        keyed.block("b", ids=torch.arange(2)),
        pytest.raises(RuntimeError, match="3 rows for 2 samples"),
    ):
        keyed.KeyedDropout(0.5)(torch.ones(3, 2))
    with pytest.raises(ValueError, match="must be in"):
        keyed.KeyedDropout(1.0)


def test_checkpoint_repeats_the_mask() -> None:
    layer, drop = nn.Linear(6, 6), keyed.KeyedDropout(0.5)
    grads = []
    for run in (lambda f, x: f(x), keyed.checkpoint):
        layer.zero_grad()
        with keyed.scope(seed=0, step=0), keyed.block("b", ids=torch.arange(4)):
            y = run(lambda x: drop(drop(layer(x)).tanh()), torch.ones(4, 6, requires_grad=True))
        y.sum().backward()  # outside of the scope, as in a pipeline
        grads.append(layer.weight.grad.clone())
    assert torch.equal(*grads) and grads[0].abs().sum() > 0


def test_checkpoint_repeats_the_mask_of_other_rows() -> None:
    layer, drop = nn.Linear(6, 6), keyed.KeyedDropout(0.5)
    grads = []
    for run in (lambda f, x: f(x), keyed.checkpoint):
        layer.zero_grad()
        block = keyed.block("b", ids=torch.arange(4))
        with keyed.scope(seed=0, step=0), block, keyed.rows(torch.arange(4) + 90):
            y = run(lambda x: drop(drop(layer(x)).tanh()), torch.ones(4, 6, requires_grad=True))
        y.sum().backward()  # the samples' ids are back
        grads.append(layer.weight.grad.clone())
    assert torch.equal(*grads) and grads[0].abs().sum() > 0


def test_seed_of_is_stable() -> None:
    assert keyed.seed_of("a", 1) == keyed.seed_of("a", 1) < 2**64
    assert len({keyed.seed_of(*p) for p in (("a", 1), ("a1",), ("a", "1"), (1, "a"), ("", "a", 1))}) == 5
