"""Ghosts keep ties, and leave alone what others hold."""

from __future__ import annotations

from torch import nn

from pipeline import Block, BlockProgram
from pipeline.ghosts import make_ghosts


def tied_program() -> tuple[BlockProgram, nn.Linear, nn.Linear]:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    blocks = [Block("a", first, ("x",), ("x",)), Block("b", second, ("x",), ("losses",))]
    return BlockProgram(blocks, inputs=("x",), outputs=("losses",)), first, second


def test_parameters_that_two_modules_hold_stay_one() -> None:
    program, first, second = tied_program()
    first.bias.requires_grad_(False)
    make_ghosts([program])
    assert list(program.named_parameters_global()) == ["a.weight", "a.bias", "b.bias"]
    assert second.weight is first.weight and all(p.is_meta for p in program.parameters())
    assert (first.weight.requires_grad, first.bias.requires_grad) == (True, False)
    before = first.weight
    make_ghosts([program])
    assert first.weight is before


def test_what_is_kept_stays() -> None:
    _, first, second = tied_program()
    weight = first.weight
    make_ghosts([second], keep=list(first.parameters()))
    assert second.weight is weight and not weight.is_meta and second.bias.is_meta
