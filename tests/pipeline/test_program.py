"""Liveness, global names and the errors of a program."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline import Block, BlockProgram
from tests.pipeline.fid_program import fid_batch, fid_program


def line(*blocks: tuple[str, tuple[str, ...], tuple[str, ...]], **options: object) -> BlockProgram:
    options = {"inputs": ("x",), "outputs": ("losses",), **options}
    return BlockProgram([Block(name, nn.Identity(), r, w) for name, r, w in blocks], **options)  # type: ignore[arg-type]


def test_carry_and_inputs_of_each_cut() -> None:
    program = fid_program()
    assert [program.carry(i) for i in range(7)] == [
        (),
        ("ctx", "ctx_mask"),
        ("ctx", "ctx_mask"),
        ("ctx", "ctx_mask"),
        ("ctx", "ctx_mask", "y"),
        ("ctx", "y"),  # the head does not need the mask
        ("losses", "correct"),
    ]
    assert program.inputs_of(0, 3) == ("passages", "sample_id")
    assert program.inputs_of(3, 6) == ("target", "labels", "weight", "scores", "sample_id")


def test_rewriting_a_name_ends_the_old_value_s_life() -> None:
    program = line(("a", ("x",), ("y",)), ("b", ("y",), ("z",)), ("c", ("x",), ("y",)), ("d", ("y", "z"), ("losses",)))
    assert program.carry(2) == ("z",) and program.carry(3) == ("y", "z")


def test_running_in_parts_is_running_whole() -> None:
    program, batch = fid_program(p=0.0), fid_batch()
    whole = program(batch)
    env = batch
    for first, last in ((0, 2), (2, 5), (5, 6)):
        env = program.run({**env, **{n: batch[n] for n in program.inputs_of(first, last)}}, first, last)
    assert all(torch.equal(env[name], whole[name]) for name in whole)


def test_a_shared_parameter_has_one_name_that_of_its_first_block() -> None:
    program = fid_program()
    names = program.named_parameters_global()
    assert next(iter(names)) == "embed.table.weight" and "head.table.weight" not in names
    assert len({id(p) for p in names.values()}) == len(names) == len(list(program.parameters()))
    assert list(program.block_parameters("head")) == ["head.temperature", "embed.table.weight"]
    assert program.block_parameters("target")["embed.table.weight"] is names["embed.table.weight"]
    assert set(names) <= set(program.state_dict())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: line(("a", ("xx",), ("losses",))),
            r"block 'a' reads unknown name 'xx' \(did you mean 'x'\?\)",
        ),
        (lambda: line(("a", ("x", "losses"), ("losses",))), "later block or itself"),
        (lambda: line(("a", ("x",), ("y",)), ("a", ("y",), ("losses",))), "block name 'a' is used 2 times"),
        (lambda: line(("a", ("x",), ("y",)), ("a.b", ("y",), ("losses",))), "prefix"),
        (lambda: line(("a", ("x",), ("losses", "y"))), "writes 'y', which no later block reads"),
        (lambda: line(("a", ("x",), ("y",)), ("b", ("x",), ("y",)), outputs=("y",)), "block 'a' writes 'y'"),
        (lambda: line(("a", ("x",), ("losses",)), inputs=("x", "z")), "input 'z' is read by no block"),
        (lambda: line(("a", ("x",), ("losses",)), outputs=("loss",)), "did you mean 'losses'"),
        (lambda: line(("a", ("x",), ("losses",)), axes={"losses": None}), "no sample axis"),
        (lambda: line(("a", ("x",), ("losses",)), axes={"x": "rows"}), "allowed: 'sample', 'pair', 'microbatch', None"),
        (lambda: line(("a b", ("x",), ("losses",))), "identifiers"),
        (lambda: line(("train", ("x",), ("losses",))), "rename the block"),
        (lambda: line(), "at least one block"),
    ],
)
def test_mistakes(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        make()


def test_wrong_rows_are_named() -> None:
    program, batch = fid_program(), fid_batch()
    with pytest.raises(ValueError, match=r"'passages' \(axis 'pair'\) has 17 rows"):
        program.num_samples({**batch, "passages": batch["passages"][:-1]})
