"""A trace is found again if, and only if, nothing that it depends on has changed."""

from __future__ import annotations

import functools
import importlib.util
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import Block, BlockProgram, Profile, fingerprint, trace
from pipeline.keyed_modules import make_keyed


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def program_of(
    *, width: int = 4, function: Callable[[Tensor], Tensor] = torch.tanh, p: float = 0.0, name: str = "b"
) -> BlockProgram:
    module = nn.Sequential(nn.Linear(3, width), Apply(function), nn.Dropout(p))
    return BlockProgram([Block(name, module, ("x",), ("losses",))], inputs=("sample_id", "x"), outputs=("losses",))


def run(program: BlockProgram, folder: Path, *, rows: int = 4, **more: Any) -> Profile:
    batch = {"sample_id": torch.arange(rows), "x": torch.randn(rows, 3)}
    options: dict[str, Any] = {"num_microbatches": 1, "repeats": 1, **more}
    return trace(program, batch, cache_dir=folder, **options)


def test_a_second_trace_is_read(tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    first = run(program_of(), tmp_path)
    again = run(program_of(), tmp_path, progress=lambda *now: told.append(now))  # other weights, same program
    assert again == first and again.cached and not first.cached
    assert told == [(1, 1, "cached")] and len(list(tmp_path.iterdir())) == 1


def double(x: Tensor) -> Tensor:
    return x * 2


def triple(x: Tensor) -> Tensor:
    return x * 3


def frozen() -> BlockProgram:
    return program_of().requires_grad_(False)


def keyed() -> BlockProgram:
    return make_keyed(program_of(p=0.5))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: program_of(width=5), {}),
        (lambda: program_of(name="c"), {}),
        (lambda: program_of(function=double), {}),
        (lambda: program_of(function=triple), {}),
        (lambda: program_of(function=lambda x: x * 4), {}),
        (lambda: program_of(function=torch.sigmoid), {}),
        (lambda: program_of(function=functools.partial(torch.clamp, min=0.0)), {}),
        (lambda: program_of(p=0.5).eval(), {}),
        (lambda: program_of(p=0.25).eval(), {}),
        (lambda: program_of().eval(), {}),
        (lambda: program_of().double(), {}),
        (frozen, {}),
        (keyed, {}),
        (program_of, {"rows": 6}),
        (program_of, {"num_microbatches": 2}),
        (program_of, {"lineage": False}),
        (program_of, {"repeats": 2}),
    ],
)
def test_a_change_is_seen(tmp_path: Path, make: Callable[[], BlockProgram], options: dict[str, Any]) -> None:
    run(program_of(), tmp_path)
    run(program_of(function=lambda x: x * 5), tmp_path)
    program = make()
    if next(program.parameters()).dtype == torch.float64:
        batch = {"sample_id": torch.arange(4), "x": torch.randn(4, 3).double()}
        assert not trace(program, batch, cache_dir=tmp_path, num_microbatches=1, repeats=1).cached
    else:
        assert not run(program, tmp_path, **options).cached
    assert len(list(tmp_path.iterdir())) == 3


def test_the_number_of_threads_counts(tmp_path: Path) -> None:
    run(program_of(), tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert not run(program_of(), tmp_path).cached
    finally:
        torch.set_num_threads(threads)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    run(program_of(), tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text("{}")
    with pytest.raises(ValueError, match=f"{path.name}.*delete the file"):
        run(program_of(), tmp_path)


def test_arguments_of_a_partial_count(tmp_path: Path) -> None:
    for least in (0.0, 0.5):
        assert not run(program_of(function=functools.partial(torch.clamp, min=least)), tmp_path).cached
    assert run(program_of(function=functools.partial(torch.clamp, min=0.5)), tmp_path).cached


def module_from(folder: Path, *, factor: int) -> BlockProgram:
    """A block whose forward calls a function of its file, which calls one of another file."""
    for name, text in {
        "cached_helper": f"def helper(x):\n    return x * {factor}\n",
        "cached_block": """
            from torch import nn
            from cached_helper import helper

            def middle(x):
                return helper(x)

            class Scale(nn.Module):
                def forward(self, x):
                    return middle(x)
        """,
    }.items():
        path = folder / str(factor) / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    module = nn.Sequential(nn.Linear(3, 1), sys.modules["cached_block"].Scale())
    return BlockProgram([Block("b", module, ("x",), ("losses",))], inputs=("sample_id", "x"), outputs=("losses",))


def test_functions_that_a_forward_calls_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cached_helper", "cached_block"):
        monkeypatch.setitem(sys.modules, name, None)  # put back afterwards
    for factor, cached in ((2, False), (2, True), (3, False)):
        fingerprint._code_of.cache_clear()  # as in another process
        assert run(module_from(tmp_path, factor=factor), tmp_path / "traces").cached is cached
    fingerprint._code_of.cache_clear()


class Doubles:
    def __call__(self, x: Tensor) -> Tensor:
        return x * 2


def test_an_unknown_object_is_not_cached(tmp_path: Path) -> None:
    for _ in range(2):
        told: list[tuple[int, int, str]] = []
        program = program_of(function=Doubles())
        assert not run(program, tmp_path, progress=lambda *now, told=told: told.append(now)).cached
        assert told[0][2] == (
            "not cached: block 'b': 1.function: what a tests.pipeline.test_trace_cache.Doubles does is not known"
        )
    assert not list(tmp_path.iterdir())
